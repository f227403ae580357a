"""Prompt tuning (Lester et al., 2021) for encoders: trained vectors instead of trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exssnet.errors import InputError
from exssnet.methods.base import check_whole
from exssnet.methods.text._base import TextSettings
from exssnet.methods.text._own import OwnParts
from exssnet.models.text_classifier import TextClassifier

FEWEST = 8  # tokens of a text that must have room behind the prompt


@dataclass(frozen=True)
class PromptSettings(TextSettings):
    """`prompts`: how many vectors a task trains."""

    lr: float = 1e-3
    prompts: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, prompts=1)


class Prompted(TextClassifier):
    """Trained vectors behind the first token, whose state the head reads; the encoder stays as it is.

    Before the first token they would be what the head reads. A text that has no room next to them is cut.
    """

    def __init__(self, encoder: nn.Module, outputs: int, count: int, generator: torch.Generator) -> None:
        super().__init__(encoder.requires_grad_(False), outputs, "first", generator)
        table = self.embeddings()
        chosen = torch.randint(len(table), (count,), generator=generator)
        self.prompts = nn.Parameter(table[chosen].detach().clone())  # started as words
        config: Any = encoder.config
        # RoBERTa and its kin count positions from behind the padding's
        offset = 2 if config.model_type in ("mpnet", "roberta", "xlm-roberta", "camembert") else 0
        self.room = config.max_position_embeddings - offset - count
        if self.room < FEWEST:
            raise InputError(
                f"prompts is {count}: of the encoder's {config.max_position_embeddings - offset} positions too few are "
                f"left for a text, give at most {config.max_position_embeddings - offset - FEWEST}"
            )

    def embeddings(self) -> Tensor:
        """The encoder's own, of all tokens."""
        table: Tensor = self.encoder.get_input_embeddings().weight  # type: ignore[operator]
        return table

    def features(self, x: Tensor) -> Tensor:
        x = x[:, : self.room]
        words = self.encoder.get_input_embeddings()(x[..., 0])  # type: ignore[operator]
        prompts = self.prompts.expand(len(x), -1, -1)
        count = prompts.shape[1]
        types = torch.cat((x[:, :1, 1], x[:, :1, 1].expand(-1, count), x[:, 1:, 1]), 1)
        spliced = torch.cat((words[:, :1], prompts, words[:, 1:]), 1)
        return self.read(self.run(types > 0, types, inputs_embeds=spliced), types > 0)


class PromptTuning(OwnParts):
    """Train a prompt of vectors and a head for each task, in front of a frozen encoder."""

    name = "prompt-tuning"
    settings_type = PromptSettings
    settings: PromptSettings

    def classifier(self, module: nn.Module) -> TextClassifier:
        return Prompted(module, self.outputs(), self.settings.prompts, self.generator("prompts"))

    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.network.named_parameters() if n == "prompts" or n.startswith("head.")}
