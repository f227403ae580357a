"""A task's probe: its answers to fixed inputs, stored in its card.

Digests cover a task's tensors, not the computation of a module: a Sigmoid instead of a ReLU has the same digests. So
the answers to a few inputs, equal on every machine, are computed when a task is learned and when the directory is
checked. The baked module computes them on the CPU, in double precision if it can.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan, prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.core.proof import tensor_digest
from exssnet.errors import StoreError
from exssnet.io.typed import Between, Length, Matching, line, typed

ROWS = 8  # inputs; fewer if they are large
NUMBERS = 2**13  # numbers in all inputs: two images of 32 × 32, so that a check is cheap
MOST_NUMBERS = 2**26
KEPT = 256  # number of stored answers
INDICES = 1000  # maximum of index inputs
TOLERANCE = 1e-4  # relative to the largest answer, for rounding on other machines
MODULUS, FACTOR = 2**31 - 1, 48271  # of MINSTD, a pseudo-random number generator

Precision = Literal["float64", "float32"]
PRECISIONS: tuple[Precision, ...] = ("float64", "float32")  # the first type that the module can compute with


@dataclass(frozen=True)
class Probe:
    """Description of the inputs, and the answers."""

    rows: Annotated[int, Between(1, ROWS)]
    shape: Annotated[tuple[Annotated[int, Between(1, MOST_NUMBERS)], ...], Length(1, 16)]
    below: Annotated[int, Between(1, INDICES)] | None  # for indices; None if the inputs are numbers
    precision: Precision
    digest: Annotated[str, Matching("[0-9a-f]{64}", "a SHA-256 in hexadecimal")]  # of all answers
    answers: Annotated[str, Length(0, 2 * 4 * KEPT)]  # the first answers, row by row: little-endian float32 in base64

    def __post_init__(self) -> None:
        if self.rows * prod(self.shape) > MOST_NUMBERS:
            raise ValueError(f"its inputs have more than {MOST_NUMBERS:,} numbers")
        if not 0 < len(self.first) <= KEPT:
            raise ValueError(f"it has {len(self.first)} answers, not 1 to {KEPT}")

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> Probe | None:
        """Parse a card's probe; None if it has none (earlier version, or the module could not take the inputs)."""
        return None if card.get("probe") is None else typed(card["probe"], cls, "the probe")

    @property
    def first(self) -> Tensor:
        """The stored answers, float32."""
        return torch.from_numpy(np.frombuffer(b64decode(self.answers, validate=True), "<f4").astype(np.float32))

    def inputs(self) -> Tensor:
        """The inputs of the network [rows, *shape]: steps of 1/16384 from -2 to 2, or indices."""
        return inputs(self.rows, self.shape, self.below)

    def distance(self, answers: Tensor) -> float:
        """Largest difference of answers, relative to the largest stored one; NaN if they have another shape."""
        if tensor_digest(answers) == self.digest:
            return 0.0
        wanted, found = self.first, answers.reshape(-1)[:KEPT]
        finite = wanted.isfinite()
        if len(found) != len(wanted) or not torch.equal(finite, found.isfinite()):
            return nan
        largest = _largest(wanted[finite])
        return _largest((found - wanted)[finite]) / largest if largest else nan


def made(network: MaskedNetwork, task: str, recipe: Mapping[str, Any], learned: Tensor) -> dict[str, Any] | None:
    """Compute the probe of a task for its card; None if the module cannot take the inputs. `learned`: its examples."""
    shape = tuple(recipe["shape"])
    rows = max(1, min(ROWS, NUMBERS // prod(shape)))
    below = max(1, min(int(learned.max()) + 1, INDICES)) if learned.dtype == torch.int64 else None
    if rows * prod(shape) > MOST_NUMBERS:
        return None
    x = inputs(rows, shape, below)
    for precision in PRECISIONS:
        try:
            answers = answered(network, task, x, precision)
        except Exception:  # of a user's own module
            continue
        first = b64encode(answers.reshape(-1)[:KEPT].numpy().astype("<f4").tobytes()).decode()
        return asdict(Probe(rows, shape, below, precision, tensor_digest(answers), first)) | {"shape": list(shape)}
    return None


def difference(network: MaskedNetwork, card: Mapping[str, Any]) -> str | None:
    """Describe how a task's answers differ from its probe; None if they are equal or there is no probe."""
    probe = Probe.of_card(card)
    if probe is None:
        return None
    try:
        away = probe.distance(answered(network, card["task"]["name"], probe.inputs(), probe.precision))
    except Exception as error:  # of a user's own module
        return f"it cannot take the probe: {line(error)}"
    if away <= TOLERANCE:
        return None
    return "its answers have another shape" if isnan(away) else f"its answers to the probe differ by {100 * away:.2g} %"


def require_one(network: MaskedNetwork, cards: Sequence[Mapping[str, Any]], own: bool) -> None:
    """Refuse a module, a user's `own` or built-in, that does not compute what the tasks were learned with.

    The first task with a probe is checked, because all tasks run on one module; `verify` checks every task.
    """
    for card in cards:
        name = card["task"]["name"]
        if name in network.tasks and card.get("probe") is not None:  # in a damaged directory some are missing
            if (wrong := difference(network, card)) is not None:
                raise StoreError(refusal(name, wrong, own))
            return


def refusal(task: str, wrong: str, own: bool) -> str:
    """The error in one line: the task, and what to do."""
    what, do = ("module", "pass the module") if own else ("built-in network", "use the version of exssnet")
    return f"the {what} does not compute what task '{task}' was learned with ({wrong}): {do} that it was learned with"


# --- Mathematics --------------------------------------------------------------------------------------------


def inputs(rows: int, shape: Sequence[int], below: int | None) -> Tensor:
    """The fixed inputs [rows, *shape]: float64, or int64 for indices."""
    numbers = minstd(rows * prod(shape))
    found = (numbers >> 15).double() / 2**14 - 2 if below is None else numbers % below
    return found.view(rows, *shape)


def minstd(count: int) -> Tensor:
    """The first numbers of MINSTD after 1: the powers of 48271 modulo 2^31 - 1."""
    found, step = torch.tensor([FACTOR], device="cpu"), FACTOR
    while len(found) < count:
        found = torch.cat([found, found * step % MODULUS])
        step = step * step % MODULUS
    return found[:count]


def answered(network: MaskedNetwork, task: str, x: Tensor, precision: Precision) -> Tensor:
    """Compute a task's answers [rows, classes], rounded to float32."""
    kind = getattr(torch, precision)
    module = network.bake(task).to("cpu", kind)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        output = module(x.to(kind) if x.is_floating_point() else x)
    answers: Tensor = getattr(output, "logits", output)
    return answers.float().contiguous()


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if len(numbers) else 0.0
