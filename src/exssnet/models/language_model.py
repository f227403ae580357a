"""A causal transformer that writes: tokens of its own for marks, and the next token from its embedding table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exssnet.errors import InputError
from exssnet.models.text_classifier import is_causal


class LanguageModel(nn.Module):
    """Rows of ids in, logits of the next token out. Rows are padded behind, where a causal model does not look."""

    def __init__(self, encoder: nn.Module, marks: int, generator: torch.Generator) -> None:
        """`marks`: how many tokens are put behind those of the vocabulary."""
        super().__init__()
        config: Any = encoder.config
        kind = type(encoder).__name__
        if not is_causal(encoder):
            raise InputError(f"{kind} is not causal and cannot write: give a causal model such as GPT-2")
        if not getattr(config, "tie_word_embeddings", False):
            raise InputError(
                f"{kind} has an output layer other than its embeddings, which is not part of an encoder: "
                f"give a model with tie_word_embeddings, such as GPT-2"
            )
        self.encoder, self.vocabulary = encoder, 0
        table = self.table.detach()
        self.vocabulary, self.positions = len(table), int(config.max_position_embeddings)
        new = torch.randn(marks, table.shape[1], generator=generator) * 0.02 + table.mean(0)
        grown = nn.Embedding(len(table) + marks, table.shape[1])
        with torch.no_grad():
            grown.weight.copy_(torch.cat((table, new)))
        encoder.set_input_embeddings(grown)  # type: ignore[operator]

    @property
    def table(self) -> Tensor:
        """The embeddings of all tokens."""
        table: Tensor = self.encoder.get_input_embeddings().weight  # type: ignore[operator]
        return table

    def forward(self, ids: Tensor, chosen: Tensor) -> Tensor:
        """Logits of the token behind each position that is chosen (bool [B, T]): [chosen, tokens]."""
        return self.states(ids)[chosen] @ self.table.T

    def states(self, ids: Tensor) -> Tensor:
        """Of every position: [B, T, width]."""
        states: Tensor = self.encoder(input_ids=ids, use_cache=False).last_hidden_state
        return states

    @torch.no_grad()
    def sampled(self, first: int, count: int, longest: int, end: int, top: int, generator: torch.Generator) -> Tensor:
        """Rows that begin with a token and go on with one of the `top` likeliest each time: ids [count, ≤ longest]."""
        ids = torch.full((count, 1), first, device=self.table.device)
        known: Any = None
        ended = torch.zeros(count, dtype=torch.bool, device=ids.device)
        while ids.shape[1] < longest and not bool(ended.all()):
            out = self.encoder(input_ids=ids[:, -1:], past_key_values=known, use_cache=True)
            known = out.past_key_values
            best = (out.last_hidden_state[:, -1] @ self.table.T).topk(min(top, len(self.table)))
            drawn = torch.multinomial(best.values.softmax(1).to(generator.device), 1, generator=generator)
            following = best.indices.gather(1, drawn.to(ids.device))
            ids = torch.cat((ids, following.masked_fill(ended[:, None], end)), 1)
            ended = ended | (ids[:, -1] == end)
        return ids

    @torch.no_grad()
    def continued(self, rows: list[list[int]], count: int) -> list[list[int]]:
        """The likeliest tokens behind each row, one after the other."""
        lengths = torch.tensor([len(row) for row in rows], device=self.table.device)
        ids = padded_rows(rows, int(lengths.max()) + count, self.table.device)
        each = torch.arange(len(rows), device=ids.device)
        for step in range(count):
            last = self.states(ids[:, : int(lengths.max()) + step])[each, lengths + step - 1]
            ids[each, lengths + step] = (last @ self.table.T).argmax(1)
        return [row[length : length + count] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


def padded_rows(rows: list[list[int]], length: int, device: torch.device, padding: int = 0) -> Tensor:
    """Rows of numbers as one tensor."""
    made = torch.full((len(rows), length), padding, dtype=torch.int64, device=device)
    for at, row in enumerate(rows):
        made[at, : len(row)] = torch.tensor(row, device=device)
    return made
