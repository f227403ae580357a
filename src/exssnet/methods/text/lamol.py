"""LAMOL (Sun et al., 2020): one language model answers questions and writes examples of earlier tasks itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from exssnet.data.tasks import Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Phase, Tensors, check_whole
from exssnet.methods.text._base import TextMethod, TextSettings
from exssnet.models.language_model import LanguageModel, padded_rows

AT_ONCE = 64  # examples that are written together
UNREAD = -100  # a target that has no loss


@dataclass(frozen=True)
class LamolSettings(TextSettings):
    """`written`: pseudo-examples for each new example. `language` weighs the loss on whole sequences."""

    epochs: int = 3
    lr: float = 6.25e-5
    clip: float = 1.0
    written: float = 0.2
    language: float = 0.25
    top: int = 20  # tokens that each written one is drawn from
    longest: int = 256  # tokens of an example that is written

    may_be_zero: ClassVar[tuple[str, ...]] = ("clip", "language")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, top=1, longest=4)


class Example(NamedTuple):
    """A question with its context, and the answer, in tokens."""

    asked: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Marks:
    """The tokens behind the vocabulary's: [ANS], the end, and [GEN] of each task."""

    first: int
    tasks: int

    @property
    def answer(self) -> int:
        return self.first

    @property
    def end(self) -> int:
        return self.first + 1

    def start(self, task: int) -> int:
        """[GEN] of a task."""
        return self.first + 2 + task

    def question(self, example: Example) -> list[int]:
        """asked, [ANS], answer, end."""
        return [*example.asked, self.answer, *example.answer, self.end]

    def language(self, example: Example, task: int) -> list[int]:
        """[GEN], asked, [ANS], answer, end."""
        return [self.start(task), *self.question(example)]

    def read(self, ids: Sequence[int]) -> Example | None:
        """The example of a sequence that was written; None of one that is malformed.

        It begins with [GEN] and has exactly one [ANS], with something on either side, and no other mark inside.
        """
        inner = list(ids[1:])
        if self.end in inner:
            inner = inner[: inner.index(self.end)]
        marks = [token for token in inner if token >= self.first]
        if not ids or not self.start(0) <= ids[0] < self.start(self.tasks) or marks != [self.answer]:
            return None
        at = inner.index(self.answer)
        return Example(inner[:at], inner[at + 1 :]) if inner[:at] and inner[at + 1 :] else None


class Lamol(TextMethod):
    """Train a language model to answer questions about texts, on new and on earlier ones that it writes itself."""

    name = "lamol"
    heads = ("task",)
    settings_type = LamolSettings
    settings: LamolSettings
    network: LanguageModel

    def classifier(self, module: nn.Module) -> nn.Module:
        return LanguageModel(module, 2 + len(self.groups), self.generator("marks"))

    def prepare(self) -> None:
        assert self.outline is not None
        self.wordings = self.outline.wordings
        self.marks = Marks(self.network.vocabulary, len(self.groups))
        self.pseudo = Tensors()  # "1.asked", "1.answer" and "1.of": written for the second task; padded with -1
        for wording in self.wordings:
            if len(set(wording.answers)) < len(wording.answers) or not all(wording.answers):
                raise InputError(
                    "lamol answers with the names of classes, and two of a task are the same in the model's tokens: "
                    "give the classes other names"
                )

    # --- learning --------------------------------------------------------------------------------------------

    def phases(self, task: Task) -> Iterator[Phase]:
        now = len(self.tasks)
        if f"{now}.of" not in self.pseudo:  # a run that is taken up has them, from weights that are no more
            self.pseudo = Tensors(self._write(task, now))
        self._examples = len(task.train)
        yield from super().phases(task)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of the answers, plus a quarter of that of whole sequences."""
        now, of_task = len(self.tasks), self.wordings[len(self.tasks)]
        new = [
            Example(self._asked(row, now), list(of_task.answers[y])) for row, y in zip(batch.x, batch.y, strict=True)
        ]
        examples = [(example, now) for example in new] + self._recalled(batch)
        questions = [self.marks.question(example) for example, _ in examples]
        answers = [len(example.asked) + 1 for example, _ in examples]  # where answers begin
        asked, right = self._cross_entropy(questions, answers)
        self._count(batch, right)
        whole = [self.marks.language(example, task) for example, task in examples]
        return asked + self.settings.language * self._cross_entropy(whole, [1] * len(whole))[0]

    def _cross_entropy(self, rows: list[list[int]], starts: list[int]) -> tuple[Tensor, Tensor]:
        """The mean over all tokens from each row's start on, and which rows have all of them right."""
        device, longest = self._device(), max(map(len, rows))
        ids = padded_rows(rows, longest, device)
        read = [[UNREAD] * (start - 1) + row[start:] for row, start in zip(rows, starts, strict=True)]
        targets = padded_rows(read, longest, device, UNREAD)  # of position t the token at t + 1
        chosen = targets != UNREAD
        logits = self.network.train()(ids, chosen)
        right = torch.ones_like(chosen)
        right[chosen] = logits.detach().argmax(1) == targets[chosen]
        return functional.cross_entropy(logits, targets[chosen]), right.all(1)

    def _count(self, batch: Batch, right: Tensor) -> None:
        """What the loop counts: the label where the answer is right, else no class."""
        count = len(self.wordings[len(self.tasks)].answers)
        found = torch.where(right[: len(batch)], batch.y, torch.full_like(batch.y, count))
        batch.logits = functional.one_hot(found, count + 1).float()

    def _asked(self, row: Tensor, task: int) -> list[int]:
        """A text and its task's question, with room for the longest answer."""
        question, answers = self.wordings[task].question, self.wordings[task].answers
        room = self.network.positions - len(question) - max(map(len, answers)) - 3
        return [*row[row[:, 1] > 0, 0].tolist()[: max(room, 1)], *question]

    # --- pseudo-examples -------------------------------------------------------------------------------------

    def _write(self, task: Task, now: int) -> dict[str, Tensor]:
        """Examples of the earlier tasks, as many of each, without the malformed."""
        self.network.eval()
        found: list[tuple[Example, int]] = []
        draw = self.generator("written", task.name)
        for earlier in range(now):
            wanted = round(self.settings.written * len(task.train) / now)
            for first in range(0, wanted, AT_ONCE):
                longest = min(self.settings.longest, self.network.positions - 1)
                rows = self.network.sampled(
                    self.marks.start(earlier), min(AT_ONCE, wanted - first), longest, self.marks.end, self.settings.top,
                    draw,
                )  # fmt: skip
                read = [self.marks.read(row) for row in rows.tolist()]
                found += [(example, earlier) for example in read if example is not None]
        device = self._device()

        def table(rows: list[list[int]]) -> Tensor:
            return padded_rows(rows, max([1, *map(len, rows)]), device, -1)

        return {
            f"{now}.asked": table([example.asked for example, _ in found]),
            f"{now}.answer": table([example.answer for example, _ in found]),
            f"{now}.of": torch.tensor([earlier for _, earlier in found], dtype=torch.int64, device=device),
        }

    def _recalled(self, batch: Batch) -> list[tuple[Example, int]]:
        """Some pseudo-examples: over an epoch about as many as there are."""
        now = len(self.tasks)
        of = self.pseudo[f"{now}.of"]
        uniform = torch.rand(1, generator=batch.generator, device=batch.generator.device)
        count = int(len(batch) * len(of) / self._examples + float(uniform))
        if not len(of) or not count:
            return []
        rows = torch.randint(len(of), (count,), generator=batch.generator, device=batch.generator.device).tolist()
        asked, answer = self.pseudo[f"{now}.asked"], self.pseudo[f"{now}.answer"]
        return [
            (Example(asked[row][asked[row] >= 0].tolist(), answer[row][answer[row] >= 0].tolist()), int(of[row]))
            for row in rows
        ]

    # --- answering -------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        return self.decoded(x, len(self.tasks))

    def logits(self, x: Tensor, task: str) -> Tensor:
        return self.decoded(x, self.tasks.index(task))

    def decoded(self, x: Tensor, task: int) -> Tensor:
        """Greedy answers [B, classes + 1]: 1 for the class whose name it is, or for none in the last column."""
        answers = [[*answer, self.marks.end] for answer in self.wordings[task].answers]
        rows = [[*self._asked(row, task), self.marks.answer] for row in x]
        self.network.eval()
        said = self.network.continued(rows, max(map(len, answers)))
        matches = [[one[: len(answer)] == answer for answer in answers] for one in said]
        found = [row.index(True) if True in row else len(answers) for row in matches]
        return functional.one_hot(torch.tensor(found, device=x.device), len(answers) + 1).float()
