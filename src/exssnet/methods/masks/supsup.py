"""SupSup: a supermask per task over weights that never move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from exssnet import randomness
from exssnet.core import init as initialise
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork
from exssnet.core.transfer import Transfer, find_lender, scores_from_mask
from exssnet.data.tasks import Outline, Task
from exssnet.errors import InputError
from exssnet.methods.base import Phase, Tensors, bits, check_positive, check_whole
from exssnet.methods.masks._base import Isolated

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
        check_whole(self, mask_epochs=1, weight_epochs=0, kkt_samples=1, kkt_neighbours=1)
        check_positive(self)
        if self.kkt_start not in STARTS:
            raise InputError(f"kkt_start is '{self.kkt_start}': choose one of {', '.join(STARTS)}")

    @property
    def epochs_per_task(self) -> int:
        return self.mask_epochs + self.weight_epochs

    @classmethod
    def of_epochs(cls, epochs: int) -> dict[str, int]:
        return {"mask_epochs": epochs - epochs // 2, "weight_epochs": epochs // 2}


@dataclass(frozen=True)
class SupSupSettings(MaskSettings):
    """Settings of SupSup, which has no phase 2."""

    @property
    def epochs_per_task(self) -> int:
        return self.mask_epochs

    @classmethod
    def of_epochs(cls, epochs: int) -> dict[str, int]:
        return {"mask_epochs": epochs}


class SupSup(Isolated):
    """Find a supermask by edge-popup over fixed random weights."""

    name = "supsup"
    settings_type: ClassVar[type[MaskSettings]] = SupSupSettings
    settings: MaskSettings

    def __init__(
        self, module: nn.Module, settings: MaskSettings, seed: int, head: str = "shared",
        outline: Outline | None = None,
        *, init: str = "signed", private: Collection[str] = (), head_layer: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, settings, seed, head, outline, init=init, private=private, head_layer=head_layer)
        self.transfers: dict[str, Transfer] = {}  # of finished tasks and the one being learned
        self.scores = Tensors()  # raw scores of finished tasks, kept if they are what is lent

    def phases(self, task: Task) -> Iterator[Phase]:
        new = self.begin(task)
        self.transfers.pop(task.name, None)  # of a task of that name which was removed
        scores = self.first_scores(task) if self.settings.kkt and self.network.tasks else None
        self.subnetwork = scored = ScoredSubnetwork(*new, scores)
        yield Phase("mask", scored.parameters(), self.settings.mask_epochs, self.settings.lr)
        if self.settings.kkt and self.settings.kkt_start == "scores":
            self.scores[task.name] = scored.scores.detach().clone()
        self.subnetwork = WeightSubnetwork(scored, self.trainable(scored.mask()))

    def trainable(self, mask: Tensor) -> Tensor | None:
        """The weights a second phase may train: none."""
        return None

    def first_scores(self, task: Task) -> Tensor:
        """KKT: fresh scores, or those that start from the mask of the earlier task that fits best."""
        fresh = initialise.fresh_scores(self.network.layout, self.seed, task.name).to(self.network.device)
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
        for name in {*self.transfers, *self.scores} - self.network.tasks.keys():
            self.transfers.pop(name, None)
            self.scores.pop(name)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        return tensors, facts | {"transfers": {n: asdict(t) for n, t in self.transfers.items()}}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().load_state(tensors, facts)
        self.transfers = {name: Transfer(**found) for name, found in facts["transfers"].items()}

    def report(self) -> dict[str, Any]:
        found = [self.transfers.get(name, Transfer(None, {})) for name in self.network.tasks]
        return super().report() | {"transfer": [asdict(transfer) for transfer in found]}

    def storage(self) -> dict[str, int]:
        """As of every method with masks, with the paper's own estimate."""
        return super().storage() | {
            "score_bits": bits(self.scores.values()),  # only where raw scores are lent
            "paper_formula_bits": self.paper_weight_bits() + self.network.bank.bits,
        }

    def paper_weight_bits(self) -> int:
        """The paper's bits for trained weights, min(|W|·k·t, |W|)·32: none here."""
        return 0
