"""Piggyback (Mallya, Davis and Lazebnik, "Piggyback: Adapting a Single Network to Multiple Tasks by Learning to Mask
Weights", 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from exssnet.core.subnetwork import OwnSubnetwork
from exssnet.data.tasks import Task
from exssnet.errors import InputError
from exssnet.methods.base import Phase
from exssnet.methods.masks._base import Isolated
from exssnet.methods.masks._subnetworks import ThresholdSubnetwork
from exssnet.methods.shared.dense import DenseSettings


@dataclass(frozen=True)
class PiggybackSettings(DenseSettings):
    """`lr` trains the first task's weights, `mask_lr` the numbers of later masks, from `start`, past `threshold`."""

    mask_lr: float = 0.001
    threshold: float = 0.005
    start: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start <= self.threshold:
            raise InputError(f"start is {self.start}: it must be above the threshold, {self.threshold}")


class Piggyback(Isolated):
    """Train the first task densely, then learn for each task which of these weights to use.

    The paper starts from a network that was trained on ImageNet. No benchmark here brings one along, so the first task
    stands in for it: its mask is all ones, and no weight moves after it.
    """

    name = "piggyback"
    heads = ("task", "shared")
    settings_type = PiggybackSettings
    settings: PiggybackSettings

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, density=1.0, **options)  # a mask has as many ones as it likes

    def phases(self, task: Task) -> Iterator[Phase]:
        settings, new = self.settings, self.begin(task)
        if not self.network.tasks:
            self.subnetwork = dense = OwnSubnetwork.dense(*new)
            yield Phase("train", dense.parameters(), settings.epochs, settings.lr)
            return
        self.subnetwork = masked = ThresholdSubnetwork(*new, settings.start, settings.threshold)
        yield Phase("mask", masked.parameters(), settings.epochs, settings.mask_lr)
        self.subnetwork = masked.fixed()
