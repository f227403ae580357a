"""Information disentanglement based regularization (Huang et al., 2021).

Two spaces read [CLS]: a general one, which is asked whether the halves of a text are swapped, and a specific one, which
is asked for the task. Both are pulled to what they were when the task began, the general one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from exssnet.data.tasks import Task
from exssnet.errors import InputError
from exssnet.methods.base import Batch, Tensors, check_whole
from exssnet.methods.text._memory import TextReplay, TextReplaySettings
from exssnet.models.text_classifier import TextClassifier, linear


@dataclass(frozen=True)
class IdbrSettings(TextReplaySettings):
    """`pull` weighs both spaces' pull, `pull_replayed` in a step that replays; `general` and `specific` each one's."""

    epochs: int = 3
    space: int = 128
    pull: float = 0.5
    pull_replayed: float = 5.0
    general: float = 0.5
    specific: float = 0.5
    task_lr: float = 5e-4  # of the layer that is asked for the task

    may_be_zero: ClassVar[tuple[str, ...]] = ("clip", "pull", "pull_replayed", "general", "specific")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, space=1)


class TwoSpaces(TextClassifier):
    """g = tanh(W_g h) and s = tanh(W_s h) of [CLS]; the classes are read from both."""

    def __init__(self, encoder: nn.Module, outputs: int, tasks: int, settings: Any, draw: torch.Generator) -> None:
        super().__init__(encoder, outputs, "first", draw)
        if self.causal:
            raise InputError(f"{type(encoder).__name__} is causal, its first token sees no text: give one such as BERT")
        size = settings.space
        self.head = linear(2 * size, outputs, draw)
        self.general, self.specific = linear(self.width, size, draw), linear(self.width, size, draw)
        self.swapped = linear(size, 2, draw)
        # Adam moves every weight by about the rate: a layer whose output is multiplied learns as much faster
        self.gain = settings.task_lr / settings.lr
        self.task = linear(size, tasks, draw, sd=0.02 / self.gain)

    def spaces(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """g and s [B, space]."""
        h = super().features(x)
        return torch.tanh(self.general(h)), torch.tanh(self.specific(h))

    def features(self, x: Tensor) -> Tensor:
        return torch.cat(self.spaces(x), 1)


class Disentangled(TextReplay):
    """Two spaces that are pulled to what they were, and examples near the centres of clusters that are replayed."""

    settings_type: ClassVar[type[Any]] = IdbrSettings
    settings: IdbrSettings
    network: TwoSpaces
    asks: ClassVar[bool]  # whether halves are swapped and the task is asked for

    def classifier(self, module: nn.Module) -> TextClassifier:
        return TwoSpaces(module, self.outputs(), len(self.groups), self.settings, self.generator("network"))

    def prepare(self) -> None:
        super().prepare()
        self.before = Tensors()  # the network as the last task left it; between tasks it is the network itself

    def trained(self) -> dict[str, nn.Parameter]:
        questions = () if self.asks else ("swapped.", "task.")  # nobody asks them
        return {name: p for name, p in super().trained().items() if not name.startswith(questions)}

    def loss(self, batch: Batch) -> Tensor:
        """CE_class + CE_swapped + c·(a·MSE(g, g_old) + b·MSE(s, s_old)), and CE_task in a step that replays."""
        self.network.train()
        replays, now = self.replays(), len(self.tasks)
        loss, outputs = self.part(batch.x, batch.y, now, replays, batch)
        batch.logits = outputs[: len(batch)][:, self.own]
        if replays:
            for task, x, labels in self.earlier(batch):
                loss = loss + self.part(x, labels, task, replays, batch)[0]
        return loss

    def part(self, x: Tensor, y: Tensor, task: int, replays: bool, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss on examples of one task, and all outputs."""
        if self.asks:
            x = both_orders(x, batch.data.shape[0], batch.generator)
            y = torch.cat((y, y))
        g, s = self.network.spaces(x)
        outputs = self.network.head(torch.cat((g, s), 1))
        loss = self.class_loss(outputs, y, task)
        if self.asks:
            loss = loss + self.questions(g, s, task, replays)
        if self.tasks:
            loss = loss + self.pull(x, g, s, replays)
        return loss, outputs

    def questions(self, g: Tensor, s: Tensor, task: int, replays: bool) -> Tensor:
        """Whether the halves are swapped, as they are in the second half of the batch, and which task it is."""
        swapped = torch.arange(len(g), device=g.device) >= len(g) // 2
        loss = functional.cross_entropy(self.network.swapped(g), swapped.long())
        if not replays:
            return loss
        asked = self.network.gain * self.network.task(s)
        return loss + functional.cross_entropy(asked, torch.full((len(s),), task, device=s.device))

    def pull(self, x: Tensor, g: Tensor, s: Tensor, replays: bool) -> Tensor:
        """c·(a·MSE(g, g_old) + b·MSE(s, s_old))."""
        of, (g_old, s_old) = self.settings, self.old_spaces(x)
        way = of.general * functional.mse_loss(g, g_old) + of.specific * functional.mse_loss(s, s_old)
        return (of.pull_replayed if replays else of.pull) * way

    def old_spaces(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """g and s as they were when this task began."""
        mode = self.network.training
        with torch.no_grad():
            both: Tensor = functional_call(self.network.eval(), dict(self.before.items()), (x,), {"features": True})
        self.network.train(mode)
        size = both.shape[1] // 2
        return both[:, :size], both[:, size:]

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        self.before.update({name: p.detach().clone() for name, p in self.trained().items()})

    def chosen(self, task: Task) -> Tensor:
        """The example nearest to each centre of clusters of [CLS]."""
        from sklearn.cluster import KMeans

        rows = torch.arange(len(task.train), device=task.train.device)
        with torch.no_grad():
            self.network.eval()
            features = [
                TextClassifier.features(self.network, task.train.batch(some)[0]) for some in torch.split(rows, 64)
            ]
        known = torch.cat(features).cpu().double()
        clusters = KMeans(self.room(task), n_init=1, random_state=self.seed).fit(known.numpy())
        distances = torch.cdist(torch.from_numpy(clusters.cluster_centers_), known)
        nearest: Tensor = torch.unique(distances.argmin(1))
        return nearest


class Idbr(Disentangled):
    """Learn a general and a specific space of each text, and pull both to what they were."""

    name = "idbr"
    asks = True


def both_orders(x: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Texts as [CLS] a [SEP] b [SEP], cut at a token drawn now, and then all of them as [CLS] b [SEP] a [SEP]."""
    texts = [row[row[:, 1] > 0, 0].tolist() for row in x]
    inner = [text[1:-1][: most - 3] for text in texts]
    draws = torch.rand(len(texts), generator=generator, device=generator.device).tolist()
    cuts = [min(1 + int(draw * (len(words) - 1)), len(words)) for draw, words in zip(draws, inner, strict=True)]
    ordered = []
    for swap in (False, True):
        for text, words, cut in zip(texts, inner, cuts, strict=True):
            first, second = (words[cut:], words[:cut]) if swap else (words[:cut], words[cut:])
            ids = [text[0], *first, text[-1], *second, text[-1]]
            ordered.append((ids, [1] * (len(first) + 2) + [2] * (len(second) + 1)))
    made = x.new_zeros(len(ordered), max(len(ids) for ids, _ in ordered), 2)
    for row, (ids, types) in enumerate(ordered):
        made[row, : len(ids)] = torch.tensor([ids, types], device=x.device).T
    return made
