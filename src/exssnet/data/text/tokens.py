"""Tokens as examples, for methods that train the encoder itself: one int64 tensor [tokens, 2] each.

Channel 0 is the token's id. Channel 1 is 1 in a text or the first half of a pair, 2 in the second half, 0 behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exssnet.data.tasks import Outline, Stream, Task, Wording, check
from exssnet.data.text.by_length import ByLength
from exssnet.data.text.stream import TextStream, TextTask
from exssnet.data.text.texts import Texts
from exssnet.encoders.transformer import TransformerEncoder
from exssnet.errors import InputError


class TokenData(ByLength):
    """Tokenized texts under a task's labels, the shortest first; a batch is as long as its longest text."""

    def __init__(self, tokens: Tensor, labels: Tensor, classes: int, shape: tuple[int, ...]) -> None:
        """`tokens`: int32 [N, longest, 2], in any order. `shape`: the most tokens of a text, the encoder's width."""
        super().__init__((tokens[..., 1] > 0).sum(1).cpu(), torch.arange(len(tokens)), labels, classes)
        self.shape = shape  # of what an encoder computes with: evaluation batches follow from it
        self.tokens = tokens[self._rows.to(tokens.device)]

    @classmethod
    def of(cls, texts: Texts, encoder: TransformerEncoder, classes: int) -> tuple[TokenData, int]:
        """Tokenize texts; also how many of them were cut."""
        rows, cut = encoder.tokenize(texts.texts)
        # a text of no tokens is one of padding, so that an encoder has something to look at
        padding = getattr(encoder.tokenizer, "pad_token_id", None) or 0
        tokens = torch.zeros(len(rows), max([len(row["input_ids"]) for row in rows] + [1]), 2, dtype=torch.int32)
        tokens[:, :, 0] = padding
        tokens[:, 0, 1] = 1
        for place, row in enumerate(rows):
            ids = torch.tensor(row["input_ids"], dtype=torch.int32)
            tokens[place, : len(ids), 0] = ids
            tokens[place, : len(ids), 1] = 1
            if "token_type_ids" in row:
                tokens[place, : len(ids), 1] += torch.tensor(row["token_type_ids"], dtype=torch.int32)
        return cls(tokens, texts.labels, classes, (encoder.limit, encoder.width)), cut

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        longest = int(self.lengths[index.cpu()].max()) if len(index) else 1
        return self.tokens[index, :longest].long(), self.labels[index]

    def examples(self, index: Tensor) -> Tensor:
        """In int32 and as long as a text can be, so that memories hold those of all tasks."""
        return padded(self.tokens[index], self.shape[0])

    def shown(self, examples: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return shown(examples)

    def to(self, device: str | torch.device) -> TokenData:
        return TokenData(self.tokens.to(device), self.labels.to(device), self.classes, self.shape)

    @classmethod
    def joined(cls, parts: Sequence[TokenData], labels: Sequence[Tensor], classes: int) -> TokenData:
        """The examples of several tasks as one, under these labels."""
        longest = max(part.tokens.shape[1] for part in parts)
        tokens = torch.cat([padded(part.tokens, longest) for part in parts])
        return cls(tokens, torch.cat(list(labels)), classes, parts[0].shape)


def padded(tokens: Tensor, length: int) -> Tensor:
    """Token rows [N, T, 2], padded to a length."""
    longer = tokens.new_zeros(len(tokens), length, 2)
    longer[:, : tokens.shape[1]] = tokens
    return longer


def shown(tokens: Tensor) -> Tensor:
    """Kept token rows as an encoder takes them: int64, as long as the longest."""
    longest = int((tokens[..., 1] > 0).sum(1).max()) if len(tokens) else 1
    return tokens[:, :longest].long()


class TokenStream(Stream):
    """A stream of texts, tokenized for its encoder and not encoded."""

    def __init__(self, texts: TextStream, method: str) -> None:
        if not isinstance(texts.encoder, TransformerEncoder):
            raise InputError(
                f"method '{method}' trains a transformer, and encoder '{texts.encoder.name}' is not one: "
                f"give --encoder with the name or folder of one"
            )
        self.texts, self.encoder = texts, texts.encoder
        self.name, self.input_shape = texts.name, (texts.encoder.limit, 2)
        self.class_order, self.max_classes = texts.class_order, texts.max_classes
        self.data_digests, self.sample = texts.data_digests, texts.sample
        self._made: dict[tuple[int, str], TokenData] = {}
        self._cut: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def task_name(self, index: int) -> str:
        return self.texts.task_name(index)

    def task(self, index: int) -> Task:
        one = self.texts.tasks[index]
        data = {part: self._tokens(index, part) for part in one.parts()}
        return Task(index, one.name, one.numbers, data["train"], data["test"], data.get("validation"))

    def outline(self) -> Outline:
        """What methods know of it beforehand."""
        numbers = tuple(tuple(group) for group in self.class_order)
        examples = sum(len(task.train) for task in self.texts.tasks)
        return Outline(tuple(map(len, numbers)), examples, numbers, tuple(map(self._wording, self.texts.tasks)))

    def _wording(self, task: TextTask) -> Wording:
        *others, last = task.class_names
        names = f"{', '.join(others)}{',' if len(others) > 1 else ''} or {last}" if others else last
        texts = [f"Is this sentence {names}?", *task.class_names]
        ids = self.encoder.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return Wording(tuple(ids[0]), tuple(map(tuple, ids[1:])))

    def text_counts(self) -> dict[str, dict[str, int]]:
        found = {}
        for index, task in enumerate(self.texts.tasks):
            for part, texts in task.parts().items():
                self._tokens(index, part)
                name = f"{task.name} {part}"
                found[name] = {"texts": len(texts), "empty": texts.empty, "cut": self._cut[name]}
        return found

    def _tokens(self, index: int, part: str) -> TokenData:
        """A split, tokenized when it is first asked for."""
        if (index, part) not in self._made:
            task = self.texts.tasks[index]
            data, cut = TokenData.of(task.parts()[part], self.encoder, len(task.class_names))
            check(data, f"{part} split of task {task.name}")
            self._made[index, part], self._cut[f"{task.name} {part}"] = data, cut
        return self._made[index, part]
