"""Which learned task does an input without a label belong to?

`confident` runs every task on the input and asks which is surest. The other two rules are SupSup's (Wortsman et al.
2020): all tasks run at once, superposed with weights α that sum to one, and the slope of the output's entropy H along
each α_i says which task would make the output surer. The superposition holds everything that a task computes with:
its masked weights, and its private tensors (norm statistics and whatever parameters are private).

The slope needs no derivative of H: with z the logits and p their softmax, log p and z differ by a constant, so
−∂H/∂α = Σ_c p_c (z_c − Σ_k p_k z_k) · ∂z_c/∂α, which keeps its digits where p is nearly even, or nearly certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.core.routing.superposition import Scaling, Superposition, scaled
from exssnet.errors import InputError, unknown

RULES = ("confident", "one-shot", "binary")
DECISIONS = ("row", "batch")
STATISTICS = ("batch", "tasks")
CHUNK = 256  # inputs run at once

SUREST = 1e-12  # no entropy is taken to be lower

Slopes = Callable[[Tensor, list[int]], Tensor]  # (cases [n], tasks) -> −∂H/∂α [n, tasks]


@dataclass(frozen=True)
class Routed:
    """The task of each row, and what was found of every candidate.

    A higher score is more likely. Under `binary` a score is the last that a candidate had before it was put aside:
    those that stayed longer have theirs from a superposition of fewer, so the choice need not have the highest.
    """

    tasks: tuple[str, ...]
    choice: Tensor  # int64 [B], index into `tasks`
    scores: Tensor  # [B, tasks]


def route(
    network: MaskedNetwork,
    x: Tensor,
    rule: str = "confident",
    tasks: Sequence[str] | None = None,
    per: str = "row",
    chunk: int = CHUNK,
    statistics: str = "batch",
    scalings: Mapping[str, Scaling] | None = None,
) -> Routed:
    """Choose a task for every row, or with `per="batch"` one for all rows, by their mean.

    confident: the lowest entropy of a task's own output, over its largest value log(classes).
    one-shot: the largest −∂H/∂α_i where all α are equal.
    binary: halve the candidates by that slope and superpose what remains, until one is left.

    Where tasks have different numbers of classes, the superposed output has as many as the largest, and H is over
    all of them. To a class that a task lacks it gives its mean logit: the class counts as one of average odds, and
    a shift of all its logits, which means nothing, moves nothing. (Zeros would favour the tasks of many classes, and
    a logit far below zero those of few: there a small task looks sure of every input.)

    Batch norms of a superposition use the statistics of the batch (of `chunk` rows), or with `statistics="tasks"` those
    that the tasks have learned, superposed; a batch of one row always these. Those of the batch find the task more
    often; with those of the tasks an answer does not depend on the other rows.

    `scalings` are for tasks that each scale inputs in their own way: `x` is then what none of them has scaled. A
    superposition mixes them like everything else that a task computes with, so its input is Σ α_i · (x scaled by i).
    """
    if rule not in RULES:
        raise unknown("rule", rule, RULES)
    if per not in DECISIONS:
        raise InputError(f"per is '{per}': choose one of {', '.join(DECISIONS)}")
    if statistics not in STATISTICS:
        raise InputError(f"statistics is '{statistics}': choose one of {', '.join(STATISTICS)}")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}: give a whole number from 1")
    names = _candidates(network, tasks)
    if len(x) == 0:
        none = torch.empty(0, len(names), dtype=network.weights.dtype, device=x.device)
        return Routed(names, none.new_empty(0, dtype=torch.int64), none)
    # tensors made under inference mode could not be differentiated
    with torch.inference_mode(False), torch.no_grad():
        x = x.clone() if x.is_inference() else x
        scores, choice = _decide(network, x, rule, names, per, chunk, statistics, scalings)
        return Routed(names, choice.expand(len(x)).contiguous(), scores.expand(len(x), -1).contiguous())


def _candidates(network: MaskedNetwork, tasks: Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(network.tasks if tasks is None else tasks)
    if not names:
        raise InputError("there is no task to choose from: learn one first, or name at least one")
    for name in names:
        network.task(name)
    if len(set(names)) < len(names):
        raise InputError(f"a task is named twice among {', '.join(names)}: name each once")
    return names


def _decide(
    network: MaskedNetwork, x: Tensor, rule: str, names: tuple[str, ...], per: str, chunk: int, statistics: str,
    scalings: Mapping[str, Scaling] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores [cases, tasks] and choices [cases]; the cases are the rows, or the one batch."""
    if rule == "confident":
        seen = {name: x if scalings is None else scaled(x, scalings[name]) for name in names}
        scores = torch.stack([-_entropies(network, seen[name], name, chunk) for name in names], 1)
        scores = scores if per == "row" else scores.mean(0, keepdim=True)
        return scores, scores.argmax(1)
    superposed = Superposition(network, names, batch_statistics=statistics == "batch", scalings=scalings)

    def slopes(cases: Tensor, among: list[int]) -> Tensor:
        if per == "row":
            return superposed.slopes_of_rows(x[cases], among, chunk)
        return superposed.slopes_of_batch(x, among, chunk)[None]

    cases = torch.arange(len(x) if per == "row" else 1, device=x.device)
    if rule == "binary":
        return halve(slopes, cases, len(names))
    scores = slopes(cases, list(range(len(names))))
    return scores, scores.argmax(1)


def _entropies(network: MaskedNetwork, x: Tensor, task: str, chunk: int) -> Tensor:
    return torch.cat([relative_entropy(network.logits(rows, task)) for rows in torch.split(x, chunk)])


# --- Mathematics --------------------------------------------------------------------------------------------


def relative_entropy(logits: Tensor) -> Tensor:
    """Entropy of each row's softmax [B], over its largest value log(classes)."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1) / math.log(logits.shape[1])


def certainty(scores: Tensor) -> Tensor:
    """log 1/H of the entropies H that the rule `confident` scores by."""
    return -(SUREST - scores).log()


def halve(slopes: Slopes, cases: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Halve every case's candidates by their slopes, ⌈log2 count⌉ times: last scores [cases, count] and choices.

    Cases with the same candidates left share a superposition. Of equals the first candidates stay.
    """
    scores = slopes(cases, list(range(count)))
    alive = torch.ones_like(scores, dtype=torch.bool)
    while count > 1:
        count = math.ceil(count / 2)
        ranked = scores.masked_fill(~alive, -math.inf).sort(dim=1, descending=True, stable=True).indices
        alive = torch.zeros_like(alive).scatter_(1, ranked[:, :count], True)
        for kept in torch.unique(alive, dim=0) if count > 1 else ():
            group = (alive == kept).all(1).nonzero().view(-1)
            among = kept.nonzero().view(-1)
            scores[group[:, None], among] = slopes(cases[group], among.tolist())
    return scores, alive.int().argmax(1)
