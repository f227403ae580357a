"""A transformer with a linear head, on tokens [B, T, 2]: ids, and where the text and its second half are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

READOUTS = ("mean", "first")


class TextClassifier(nn.Module):
    """The mean over the token states, or the state of the first token, through a linear layer.

    A causal model's first token sees nothing of the text: there the state of the last token is taken instead.
    """

    def __init__(self, encoder: nn.Module, outputs: int, readout: str, generator: torch.Generator) -> None:
        super().__init__()
        config: Any = encoder.config
        self.encoder, self.readout = encoder, readout
        self.width = int(config.hidden_size)
        self.types = (getattr(config, "type_vocab_size", None) or 0) > 1
        self.head = linear(self.width, outputs, generator)
        self.causal = is_causal(encoder)

    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        """All outputs [B, O], or what the head sees."""
        seen = self.features(x)
        return seen if features else self.head(seen)

    def features(self, x: Tensor) -> Tensor:
        """What the head sees: [B, width]."""
        return self.read(self.states(x), x[..., 1] > 0)

    def states(self, x: Tensor) -> Tensor:
        """The last layer's token states [B, T, width]."""
        return self.run(mask=x[..., 1] > 0, types=x[..., 1], input_ids=x[..., 0])

    def run(self, mask: Tensor, types: Tensor, **given: Tensor) -> Tensor:
        """The same of ids or embeddings. `types`: 1 in the first half, 2 in the second."""
        if self.types:
            given["token_type_ids"] = (types - 1).clamp(min=0)
        states: Tensor = self.encoder(attention_mask=mask.long(), **given).last_hidden_state
        return states

    def read(self, states: Tensor, mask: Tensor) -> Tensor:
        """What the head sees of token states."""
        if self.readout == "mean":
            return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        if not self.causal:
            return states[:, 0]
        last = mask.sum(1) - 1
        return states[torch.arange(len(states), device=states.device), last]


def linear(inputs: int, outputs: int, generator: torch.Generator, sd: float = 0.02) -> nn.Linear:
    """A layer started as BERT's own are: normal weights, a bias of zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=sd, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def is_causal(encoder: nn.Module) -> bool:
    """Whether a token's state says nothing of the tokens behind it: tried out on two texts of three tokens."""
    device = next(encoder.parameters()).device
    was, ids = encoder.training, torch.tensor([[1, 2, 3], [1, 2, 4]], device=device)
    first = encoder.eval()(input_ids=ids).last_hidden_state[:, 0]
    encoder.train(was)
    return bool(torch.allclose(first[0], first[1], rtol=0, atol=1e-6))
