"""What is left: free weights now, and what more tasks will leave and cost.

A new mask is taken to fall on used and free weights alike, layer by layer; a mask that starts from a lender's falls on
used ones more often, and leaves more free. So these are expectations for tasks that have little in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.core.selection import keep_counts
from exssnet.errors import InputError

HALF = 0.5  # a density fits if the last task still finds this share of its weights free


@dataclass(frozen=True)
class LayerPlan:
    """Weights of a layer: all, free now, and expected to be free afterwards."""

    name: str
    size: int
    free: int
    expected: float


@dataclass(frozen=True)
class Plan:
    """For so many more tasks at a density."""

    tasks: int
    density: float
    layers: tuple[LayerPlan, ...]
    overlap: float  # expected share of the last task's mask that others use already
    mask_bytes: float  # expected, for all of the new tasks
    weight_bytes: float
    private_bytes: float
    card_bytes: float  # what is written about them, and the headers of their files
    fitting: float | None  # the largest density at which the last task finds half of its weights free

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
    """What `tasks` more tasks at this density will leave and cost; `card` are bytes of each that are no tensors.

    Private tensors are taken to be as large as those of the tasks so far, or of one with as many classes as the
    network was built for. `trains`: whether the method trains the free weights in a mask.
    """
    if type(tasks) is not int or tasks < 1:
        raise InputError(f"tasks is {tasks}: give a whole number, at least 1")
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
        fitting = None  # it would leave a layer without a weight
    private = [_bytes(task.private) for task in network.tasks.values()] or [_bytes(network.start_private("", 2))]
    return Plan(
        tasks, density, tuple(layers), 1 - before / sum(keep), mask_bits / 8,
        network.weights.element_size() * trained if trains else 0.0, tasks * sum(private) / len(private), tasks * card,
        fitting,
    )  # fmt: skip


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def entropy_bits(size: int, ones: int) -> float:
    """n·H(k): what a mask of so many ones in a layer cannot do without."""
    share = ones / size
    return size * sum(-p * log2(p) for p in (share, 1 - share) if p)


def fitting_density(free: float, tasks: int) -> float | None:
    """The largest density at which the last of the tasks still finds half of its weights free."""
    if free < HALF:
        return None
    return 1.0 if tasks == 1 else 1 - (HALF / free) ** (1 / (tasks - 1))


def running_low(network: MaskedNetwork) -> str | None:
    """A warning when the next task will find less than a quarter of its weights free."""
    share = network.bank.free_count / network.bank.size
    if share >= HALF / 2:
        return None
    return (
        f"{100 * share:.0f} % of the weights are free: new tasks will mostly select among trained ones. "
        f"A lower density for the next ones, or a new model, leaves them more to learn"
    )
