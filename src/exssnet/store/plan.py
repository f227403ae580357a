"""Free weights now, and after further tasks, and their cost.

A new mask is assumed to use free and used weights alike, layer by layer. A mask that starts from a lender's mask uses
used weights more often and leaves more free, so these are expectations for tasks that share little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import keep_counts
from exssnet.errors import InputError

HALF = 0.5  # a density fits if this fraction of the last task's weights is still free


@dataclass(frozen=True)
class LayerPlan:
    """Weights of a layer: all, free, and expected to be free after the tasks."""

    name: str
    size: int
    free: int
    expected: float


@dataclass(frozen=True)
class Plan:
    """Expectations for a number of further tasks at a density."""

    tasks: int
    density: float
    layers: tuple[LayerPlan, ...]
    overlap: float  # expected fraction of the last task's mask that earlier tasks use
    mask_bytes: float  # expected, for all of the new tasks
    weight_bytes: float
    private_bytes: float
    card_bytes: float  # cards and headers of files
    fitting: float | None  # the largest density at which half of the last task's weights are free

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def free(self) -> int:
        return sum(layer.free for layer in self.layers)

    @property
    def expected(self) -> float:
        return sum(layer.expected for layer in self.layers)

    @property
    def bytes(self) -> float:
        return self.mask_bytes + self.weight_bytes + self.private_bytes + self.card_bytes


def plan(network: MaskedNetwork, tasks: int, density: float, trains: bool = True, card: float = 0.0) -> Plan:
    """Expect what `tasks` further tasks at this density leave and cost; `card`: bytes of each besides tensors.

    Private tensors are assumed to be as large as those of the tasks so far, or of one with as many classes as the
    network was built for. `trains`: whether the method trains the free weights in a mask.
    """
    if type(tasks) is not int or tasks < 1:
        raise InputError(f"tasks is {tasks}: give a whole number from 1")
    keep = keep_counts(network.layout, density)
    free = [layer.numel() - int(layer.count_nonzero()) for layer in network.layout.slices(network.bank.used)]
    layers, before = [], 0.0
    mask_bits = trained = 0.0
    for layer, kept, left in zip(network.layout.layers, keep, free, strict=True):
        share = kept / layer.size
        layers.append(LayerPlan(layer.name, layer.size, left, left * (1 - share) ** tasks))
        before += left * (1 - share) ** (tasks - 1) * share  # free weights in the last mask
        mask_bits += tasks * entropy_bits(layer.size, kept)
        trained += left * (1 - (1 - share) ** tasks)
    fitting = fitting_density(sum(free) / network.layout.size, tasks)
    if fitting is not None and fitting * min(layer.size for layer in network.layout.layers) < 1:
        fitting = None  # a layer would have no weight
    private = [_bytes(task.private) for task in network.tasks.values()] or [_bytes(network.start_private("", 2))]
    return Plan(
        tasks, density, tuple(layers), 1 - before / sum(keep), mask_bits / 8,
        network.weights.element_size() * trained if trains else 0.0, tasks * sum(private) / len(private), tasks * card,
        fitting,
    )  # fmt: skip


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def entropy_bits(size: int, ones: int) -> float:
    """n·H(k): the entropy of a mask with this number of ones in a layer."""
    share = ones / size
    return size * sum(-p * log2(p) for p in (share, 1 - share) if p)


def fitting_density(free: float, tasks: int) -> float | None:
    """The largest density at which half of the last task's weights are free."""
    if free < HALF:
        return None
    return 1.0 if tasks == 1 else 1 - (HALF / free) ** (1 / (tasks - 1))


def running_low(network: MaskedNetwork) -> str | None:
    """Warn if less than a quarter of the next task's weights will be free."""
    share = network.bank.free_count / network.bank.size
    if share >= HALF / 2:
        return None
    return (
        f"only {100 * share:.0f} % of the weights are free, and new tasks will mostly use trained ones: "
        f"give a lower --density, or start a new model"
    )
