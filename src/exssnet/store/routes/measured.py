"""Measurement of routing, made when a task is learned and stored in its card.

Held-out inputs of the new task and of earlier ones are routed among these tasks and counted. The same inputs give two
numbers: the temperature, which calibrates the probabilities of candidates, and the threshold, below which a task is
unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.core.routing.rules import certainty
from exssnet.errors import ExssnetError, ParseError
from exssnet.io.typed import Between, Length, typed
from exssnet.store.routes.held_out import MOST_ROWS, spread
from exssnet.store.routes.scaled_routing import route_among

if TYPE_CHECKING:
    from exssnet.store.format.card import Card

RULE = "confident"
MOST_TASKS = 20  # number of tasks measured together; of more, the lender and evenly spaced others
MOST_RUNS = 20_000  # inputs × candidates × measured tasks, which limits the cost per task
TEMPERATURES = torch.logspace(-1, 3, 81, dtype=torch.float64)
RIGHT = 0.95  # at least this fraction of the answers above the threshold names the right task
REFUSED = 0.05  # at least this fraction of the held-out inputs is below it
CONFUSED = 0.15  # fraction of a task's inputs routed to one other task that causes a warning
FEWEST = 2  # minimum number of inputs for a warning

Share = Annotated[float, Between(0, 1)]
Names = Annotated[tuple[str, ...], Length(2, 1000)]


@dataclass(frozen=True)
class Measured:
    """Where held-out inputs of some of `tasks` were routed when the newest task was learned."""

    rule: str
    tasks: Names  # the candidates, in the order they were learned; the newest is the last
    found: dict[str, tuple[int, ...]]  # measured task -> number of its inputs routed to each candidate
    not_measured: dict[str, str]  # the others -> why
    of: Annotated[int, Between(2, 2**31)]  # number of tasks; there may be fewer candidates
    temperature: Annotated[float, Between(0.01, 10**4)] | None  # None if nothing was measured, like the threshold
    threshold: Share | None

    @classmethod
    def of_card(cls, card: Mapping[str, Any]) -> Measured | None:
        if card.get("routing") is None:
            return None
        where = f"the routing of task '{card['task']['name']}'"
        found = typed(card["routing"], cls, where)
        if set(found.found) - set(found.tasks) or {len(n) for n in found.found.values()} - {len(found.tasks)}:
            raise ParseError(f"{where} has counts for tasks that it does not name")
        return found

    def json(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(asdict(self))))

    def share(self, task: str) -> float:
        """The fraction of a measured task's held-out inputs that were routed to it."""
        counts = self.found[task]
        return counts[self.tasks.index(task)] / max(sum(counts), 1)

    def confused(self) -> list[tuple[float, str, str]]:
        """Pairs of tasks where inputs of one are often routed to the other: fraction, task, other; worst first."""
        pairs = []
        for task, counts in self.found.items():
            others = [(count, other) for other, count in zip(self.tasks, counts, strict=True) if other != task]
            pairs += [
                (n / sum(counts), task, other) for n, other in others if n >= FEWEST and n > CONFUSED * sum(counts)
            ]
        return sorted(pairs, reverse=True)

    def warning(self) -> str | None:
        """Warn in one line if `--task auto` is unreliable."""
        pairs = self.confused()
        if not pairs:
            return None
        _, task, other = pairs[0]
        counts = self.found[task]
        more = f" (and {len(pairs) - 1} more such pairs)" if len(pairs) > 1 else ""
        return (
            f"of {sum(counts)} held-out inputs of '{task}' {counts[self.tasks.index(other)]} are routed to '{other}'"
            f"{more}: --task auto is unreliable for these tasks"
        )

    def renamed(self, task: str, name: str) -> Measured:
        new = {task: name}
        return replace(
            self, tasks=tuple(new.get(one, one) for one in self.tasks),
            found={new.get(one, one): counts for one, counts in self.found.items()},
            not_measured={new.get(one, one): why for one, why in self.not_measured.items()},
        )  # fmt: skip

    def without(self, task: str) -> Measured | None:
        """The measurement without a removed task and its counts."""
        left = [place for place, one in enumerate(self.tasks) if one != task]
        if len(left) < 2:
            return None
        return replace(
            self, tasks=tuple(self.tasks[place] for place in left),
            found={one: tuple(counts[place] for place in left) for one, counts in self.found.items() if one != task},
            not_measured={one: why for one, why in self.not_measured.items() if one != task},
        )  # fmt: skip


def measure(network: MaskedNetwork, cards: Sequence[Card], inputs: Callable[[Card, int], Tensor]) -> Measured | None:
    """Route held-out inputs among the newest task, the last of the cards, and earlier tasks with the same inputs.

    `inputs` returns held-out inputs of a task, or raises an error that says why there are none. None if there is no
    other task.
    """
    among = candidates(cards)
    if len(among) < 2:
        return None
    rows = max(1, min(MOST_ROWS, MOST_RUNS // len(among) ** 2))
    names = tuple(card["task"]["name"] for card in among)
    found: dict[str, tuple[int, ...]] = {}
    missing: dict[str, str] = {}
    scores, own = [], []
    for place in reversed(range(len(among))):  # the newest first, because reading files is limited
        try:
            routed = route_among(network, among, inputs(among[place], rows), RULE)
        except (ExssnetError, OSError) as error:
            missing[names[place]] = str(error)
            continue
        found[names[place]] = tuple(torch.bincount(routed.choice.cpu(), minlength=len(names)).tolist())
        scores.append(routed.scores.cpu())
        own.append(torch.full((len(routed.choice),), place))
    of = sum(takes(card["recipe"]) == takes(cards[-1]["recipe"]) for card in cards)
    known = calibrated(torch.cat(scores), torch.cat(own)) if scores else (None, None)
    return Measured(RULE, names, found, missing, of, *known)


def written(tasks: int) -> float:
    """Estimate the bytes of this in the card of one of `tasks` tasks."""
    count = min(tasks, MOST_TASKS)
    return 120 + 40 * count + 7 * count**2 if count > 1 else 0.0


def candidates(cards: Sequence[Card]) -> list[Card]:
    """The newest task, and of earlier tasks with the same inputs its lender and evenly spaced others."""
    new = cards[-1]
    earlier = [card for card in cards[:-1] if takes(card["recipe"]) == takes(new["recipe"])]
    lender = [place for place, card in enumerate(earlier) if card["task"]["name"] == new["task"]["lender"]]
    others = [place for place in range(len(earlier)) if place not in lender]
    some = spread(len(others), MOST_TASKS - 1 - len(lender)).tolist()
    return [*(earlier[place] for place in sorted(lender + [others[at] for at in some])), new]


def takes(recipe: Mapping[str, Any]) -> str:
    """Properties of inputs that two tasks must share to take the same inputs."""
    dtype = "uint8" if recipe["kind"] == "image" else "float32"
    return json.dumps([recipe["shape"], recipe.get("dtype", dtype), recipe.get("columns")])


# --- Mathematics --------------------------------------------------------------------------------------------


def probabilities(scores: Tensor, temperature: float) -> Tensor:
    """Probability of each candidate [n, candidates], from its scores by the rule `confident`.

    Proportional to 1/H^(1/temperature), with H the entropy of its output: entropies of certain tasks differ by orders
    of magnitude, so their ratios are informative.
    """
    return (certainty(scores.double()) / temperature).softmax(1)


def calibrated(scores: Tensor, own: Tensor) -> tuple[float, float]:
    """Fit temperature and threshold to scores [n, candidates] of inputs of these tasks [n], with equal weight per task.

    The temperature maximizes the likelihood of the right tasks (temperature scaling). The target is not 1 but
    1 − 1/(n + 2), as in Platt scaling: no finite sample shows that a candidate is certain.
    """
    n, count = scores.shape
    weight = 1 / torch.bincount(own, minlength=count)[own].double()
    weight = weight / weight.sum()
    aim = torch.full((n, count), 1 / (n + 2) / (count - 1), dtype=torch.float64)
    aim[torch.arange(n), own] = 1 - 1 / (n + 2)
    losses = [-(weight @ (aim * probabilities(scores, float(t)).log()).sum(1)) for t in TEMPERATURES]
    temperature = float(TEMPERATURES[int(torch.stack(losses).argmin())])
    best, choice = probabilities(scores, temperature).max(1)
    return temperature, threshold(best, (choice == own).double(), weight)


def threshold(probability: Tensor, right: Tensor, weight: Tensor) -> float:
    """The lowest probability above which enough answers name the right task and below which enough inputs are.

    1 if no probability is high enough; then every task is unknown.
    """
    order = probability.argsort(descending=True)
    ranked, weight, right = probability[order], weight[order], right[order]
    kept = weight.cumsum(0)
    doubt = (
        weight.max() if not bool(right.all()) else 0.0
    )  # count one more wrong answer, because three right ones prove nothing
    good = (right * weight).cumsum(0) / (kept + doubt) >= RIGHT
    few = kept - weight < (1 - REFUSED) * weight.sum() - 1e-9
    last = torch.ones_like(good)  # of equal ones: all or none of them are above
    last[:-1] = ranked[1:] < ranked[:-1]
    fits = (good & few & last).nonzero()
    return float(ranked[int(fits[-1])]) if len(fits) else 1.0
