"""SupSup: a supermask per task over weights that never move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exssnet import randomness
from exssnet.core import initialise
from exssnet.core.execution import Execution
from exssnet.core.network import MaskedNetwork
from exssnet.core.proof import Verification
from exssnet.core.subnetwork import ScoredSubnetwork, Subnetwork, WeightSubnetwork
from exssnet.core.transfer import Transfer, find_lender, scores_from_mask
from exssnet.data.task import Task
from exssnet.errors import InputError
from exssnet.methods.base import Method, Phase

STARTS = ("bits", "scores")


@dataclass(frozen=True)
class MaskSettings:
    """Settings of the mask methods. `mask_*` is phase 1, `weight_*` phase 2, `kkt_*` the transfer."""

    density: float = 0.1
    mask_epochs: int = 15
    weight_epochs: int = 15
    lr: float = 0.01
    weight_lr: float = 0.003
    kkt: bool = False
    kkt_start: str = "bits"  # what a lender lends: its mask's bits, or the raw scores (kept for every task)
    kkt_samples: int = 640
    kkt_neighbours: int = 10

    def __post_init__(self) -> None:
        for name, least in (("mask_epochs", 1), ("weight_epochs", 0), ("kkt_samples", 1), ("kkt_neighbours", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}: it must be a whole number, at least {least}")
        for name in ("lr", "weight_lr"):
            if not isinstance(getattr(self, name), int | float) or not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}: it must be a positive number, for example 0.001")
        if self.kkt_start not in STARTS:
            raise InputError(f"kkt_start is '{self.kkt_start}': choose one of {', '.join(STARTS)}")


class SupSup(Method):
    """Find a supermask by edge-popup over fixed random weights."""

    name = "supsup"
    settings_type = MaskSettings
    settings: MaskSettings
    exclusive: ClassVar[bool] = True  # whether earlier tasks are promised to stay as they are

    def __init__(
        self, module: nn.Module, settings: MaskSettings, seed: int, head: str = "shared",
        *, init: str = "signed", private: Collection[str] = (), head_layer: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, settings, seed, head)
        self.network = MaskedNetwork(
            module, settings.density, seed, init=init, private=private, head=head, head_layer=head_layer
        )
        self.subnetwork: Subnetwork | None = None  # of the task being learned
        self.transfers: dict[str, Transfer] = {}  # of finished tasks and the one being learned
        self.scores: dict[str, Tensor] = {}  # raw scores of finished tasks, kept if they are what is lent

    @staticmethod
    def planned_epochs(settings: MaskSettings) -> int:
        return settings.mask_epochs

    def phases(self, task: Task) -> Iterator[Phase]:
        scores = self.first_scores(task) if self.settings.kkt else None
        self.subnetwork = scored = ScoredSubnetwork(self.network, task.name, task.train.classes, scores)
        yield Phase("mask", scored.parameters(), self.settings.mask_epochs, self.settings.lr)
        if self.settings.kkt and self.settings.kkt_start == "scores":
            self.scores[task.name] = scored.scores.detach().clone()
        self.subnetwork = WeightSubnetwork(scored, self.trainable(scored.mask()))

    def trainable(self, mask: Tensor) -> Tensor | None:
        """The weights a second phase may train: none."""
        return None

    def first_scores(self, task: Task) -> Tensor:
        """KKT: fresh scores, or those that start from the mask of the earlier task that fits best."""
        fresh = initialise.fresh_scores(self.network.layout, self.seed, task.name)
        draw = randomness.generator(self.seed, "kkt", task.name)
        index = torch.randperm(len(task.train), generator=draw)[: self.settings.kkt_samples]
        x, y = task.train.batch(index.to(task.train.device))
        found = find_lender(self.network, x, y, task.train.classes, self.settings.kkt_neighbours)
        self.transfers[task.name] = found
        if found.lender is None:
            return fresh
        if self.settings.kkt_start == "scores":
            return self.scores[found.lender]
        return scores_from_mask(fresh, self.network.mask(found.lender), self.network.layout)

    def end_task(self, task: Task) -> None:
        assert isinstance(self.subnetwork, WeightSubnetwork)
        found = self.transfers.get(task.name)
        self.subnetwork.commit(lender=found.lender if found else None, exclusive=self.exclusive)
        self.subnetwork = None

    def drop_unfinished(self) -> None:
        """Let go of a task whose learning was broken off."""
        self.subnetwork = None
        for kept in (self.transfers, self.scores):
            for name in kept.keys() - self.network.tasks.keys():
                kept.pop(name)

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        assert self.subnetwork is not None
        return self.subnetwork.logits(x, training=training)

    def logits(self, x: Tensor, task: str) -> Tensor:
        return self.network.logits(x, task)

    @property
    def capturable(self) -> bool:
        return self.network.runner.capturable

    def buffers(self) -> dict[str, Tensor]:
        return self.subnetwork.buffers() if self.subnetwork is not None else {}

    def to(self, device: str) -> None:
        self.network.to(device)

    def execute(self, execution: Execution) -> None:
        self.network.execute(execution)

    def verify(self) -> Verification | None:
        report = self.network.verify()
        if self.exclusive:
            report.require()
        return report

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, cards = self.network.state()
        tensors |= {f"scores.{name}": scores for name, scores in self.scores.items()}
        return tensors, {"tasks": cards, "transfers": {n: asdict(t) for n, t in self.transfers.items()}}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.network.load_state(tensors, facts["tasks"])
        self.verify()
        self.transfers = {name: Transfer(**found) for name, found in facts["transfers"].items()}
        kept = (name for name in tensors if name.startswith("scores."))
        self.scores = {name.removeprefix("scores."): tensors[name].to(self.network.device) for name in kept}

    def facts(self) -> dict[str, Any]:
        tasks = self.network.tasks.values()
        return {
            "sparse_overlap": [task.overlap for task in tasks],
            "transfer": [asdict(self.transfers.get(task.name, Transfer(None, {}))) for task in tasks],
            "storage": self.storage(),
        }

    def storage(self) -> dict[str, int]:
        """Bits to keep: masks, trained weights and private tensors, beside the paper's own estimate."""
        network = self.network
        private = [t for task in network.tasks.values() for t in task.private.values()]
        return {
            "mask_bits": network.bank.bits,
            "weight_bits": 8 * network.weights.element_size() * self.trained_weights(),
            "private_bits": _bits(private),
            "score_bits": _bits(list(self.scores.values())),  # only where raw scores are lent
            "paper_formula_bits": self.paper_weight_bits() + network.bank.bits,
        }

    def trained_weights(self) -> int:
        """Shared weights that differ from their seed: only these are stored."""
        return sum(task.trained_weights for task in self.network.tasks.values())

    def paper_weight_bits(self) -> int:
        """The paper's bits for trained weights, min(|W|·k·t, |W|)·32: none here."""
        return 0


def _bits(tensors: list[Tensor]) -> int:
    return sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors)
