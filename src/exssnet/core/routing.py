"""Which learned task does an input without a label belong to?

`confident` runs every task on the input and asks which is surest. The other two rules are SupSup's (Wortsman et al.
2020): all tasks run at once, superposed with weights α that sum to one, and the slope of the output's entropy H along
each α_i says which task would make the output surer. The superposition holds everything that a task computes with:
its masked weights, and its private tensors (norm statistics and whatever parameters are private).

The slope needs no derivative of H: with z the logits and p their softmax, log p and z differ by a constant, so
−∂H/∂α = Σ_c p_c (z_c − Σ_k p_k z_k) · ∂z_c/∂α, which keeps its digits where p is nearly even, or nearly certain.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from exssnet.core.network import MaskedNetwork
from exssnet.errors import InputError, unknown

RULES = ("confident", "one-shot", "binary")
DECISIONS = ("row", "batch")
STATISTICS = ("batch", "tasks")
CHUNK = 256  # inputs run at once
HELD = 2**26  # numbers of all tasks' tensors that are held; where there are more, they are made when needed

SUREST = 1e-12  # no entropy is taken to be lower
SCALING = FACTOR, OFFSET = ".factor", ".offset"  # no tensor of a module has such a name

Tensors = dict[str, Tensor]
Scaling = tuple[Tensor, Tensor]  # factor and offset, as they broadcast with inputs
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
    binary: halve the candidates by that slope and superpose anew what remains, until one is left.

    Where tasks have different numbers of classes, the superposed output has as many as the largest, and H is over
    all of them. To a class that a task lacks it gives its mean logit: the class counts as one of average odds, and
    a shift of all its logits, which means nothing, moves nothing. (Zeros would favour the tasks of many classes, and
    a logit far below zero those of few: there a small task looks sure of every input.)

    Batch norms of a superposition use the statistics of the batch (of `chunk` rows), or with `statistics="tasks"` those
    that the tasks have learned, superposed; a batch of one row always these. Those of the batch find the task more
    often; with those of the tasks an answer does not depend on the rows beside it.

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


def descent(logits: Tensor) -> Tensor:
    """−∂H/∂z = p (z − E_p z) of each row: the change of its logits that makes it surer."""
    p = logits.softmax(1)
    z = logits - logits.amax(1, keepdim=True)  # so that the rest is not lost beside a p of nearly one
    return p * (z - (p * z).sum(1, keepdim=True))


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


# --- Running tasks as one -----------------------------------------------------------------------------------


class Superposition:
    """Some tasks of a network, run as one.

    It runs a plain copy of the module in the weights' own number type: the kernels of a faster execution have no
    forward mode, and its number type too few digits for a slope.
    """

    def __init__(
        self, network: MaskedNetwork, tasks: Sequence[str], batch_statistics: bool = False,
        scalings: Mapping[str, Scaling] | None = None,
    ) -> None:  # fmt: skip
        self._network = network
        self._scalings = None if scalings is None else [scalings[name] for name in tasks]
        parts = network.runner.skeleton.modules()
        normed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)
        self._batch_statistics = batch_statistics and normed
        self._learned = [network.task(name) for name in tasks]
        self._classes = max(learned.classes for learned in self._learned)
        self._module = copy.deepcopy(network.runner.skeleton)  # tensors are swapped into it: each caller has one
        read = {name for name, _ in (*self._module.named_parameters(), *self._module.named_buffers())}
        owned = {name: tensor for learned in self._learned for name, tensor in learned.private.items() if name in read}
        # between whole numbers there is nothing: counters and the like stay as they were before any task
        self._own = [name for name, tensor in owned.items() if tensor.is_floating_point()]
        shared = network.frozen | network.buffers
        self._shared = {n: t[: self._classes] if n in self._head else t for n, t in shared.items() if n in read}
        numbers = network.layout.size + sum(owned[name].numel() for name in self._own)
        self._held: dict[int, Tensors] = {}
        self._holds = numbers * len(tasks) <= HELD

    @property
    def _head(self) -> tuple[str, str]:
        return f"{self._network.partition.head}.weight", f"{self._network.partition.head}.bias"

    def tensors(self, task: int) -> Tensors:
        """All that the task computes with and others do not, by name."""
        if task in self._held:
            return self._held[task]
        learned = self._learned[task]
        own = self._network.buffers | learned.private  # a buffer that learning did not move is nobody's own
        tensors = self._network.effective(learned.name) | {name: own[name] for name in self._own}
        for name in self._head:
            if name in tensors:
                tensors[name] = resized(tensors[name], learned.classes, self._classes)
        if self._scalings is not None:
            tensors |= zip(SCALING, self._scalings[task], strict=True)
        if self._holds:
            self._held[task] = tensors
        return tensors

    def mixed(self, among: Sequence[int]) -> Tensors:
        """Σ α_i · tensors(i), the α equal."""
        total = {name: tensor / len(among) for name, tensor in self.tensors(among[0]).items()}
        for task in among[1:]:
            for name, tensor in self.tensors(task).items():
                total[name].add_(tensor, alpha=1 / len(among))
        return total

    def logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        x = x.to(self._network.weights.dtype) if x.is_floating_point() else x
        if self._scalings is not None:
            x = scaled(x, (tensors[FACTOR], tensors[OFFSET]))
            tensors = {name: tensor for name, tensor in tensors.items() if name not in SCALING}
        with (
            _PlainNorms(self._batch_statistics and len(x) > 1),
            sdpa_kernel(SDPBackend.MATH),
        ):  # the other forms of attention have no forward mode
            output = functional_call(self._module, {**self._shared, **tensors}, (x,))
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def slopes_of_rows(self, x: Tensor, among: Sequence[int], chunk: int) -> Tensor:
        """−∂H/∂α of every row [B, among], by a forward-mode product for each task."""
        if len(x) < len(among) and not self._batch_statistics:  # a backward pass for each row is less
            return self._row_by_row(x, among)
        mixed = self.mixed(among)
        columns = []
        for task in among:
            along = self.tensors(task)  # ∂(Σ α_i t_i)/∂α_i = t_i
            try:
                columns.append(torch.cat([self._slope(mixed, along, rows) for rows in torch.split(x, chunk)]))
            except RuntimeError:  # an operator without a rule for forward mode
                return torch.cat([self._row_by_row(rows, among) for rows in torch.split(x, chunk)])
        return torch.stack(columns, 1)

    def _slope(self, mixed: Tensors, along: Tensors, x: Tensor) -> Tensor:
        run = jvp(lambda tensors: self.logits(tensors, x), (mixed,), (along,))  # logits, and their change along
        slope: Tensor = (descent(run[0]) * run[1]).sum(1)
        return slope

    def slopes_of_batch(self, x: Tensor, among: Sequence[int], chunk: int) -> Tensor:
        """−∂H/∂α of the rows' mean entropy [among]: a backward pass to the mixed tensors, then along each task's."""
        mixed = {name: tensor.requires_grad_() for name, tensor in self.mixed(among).items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in mixed.items()}
        for rows in torch.split(x, chunk):
            with torch.enable_grad():
                logits = self.logits(mixed, rows)
            _add(total, mixed, logits, descent(logits.detach()) / len(x))
        return self._along(total, among)

    def _row_by_row(self, x: Tensor, among: Sequence[int]) -> Tensor:
        """The slopes of every row [B, among] by a backward pass for each, through the batch that the rows make."""
        mixed = {name: tensor.requires_grad_() for name, tensor in self.mixed(among).items()}
        found = []
        for rows in [x] if self._batch_statistics else torch.split(x, 1):
            with torch.enable_grad():
                logits = self.logits(mixed, rows)
            flow = descent(logits.detach())
            for row in torch.eye(len(rows), dtype=flow.dtype, device=flow.device):
                total = {name: torch.zeros_like(tensor) for name, tensor in mixed.items()}
                _add(total, mixed, logits, flow * row[:, None])
                found.append(self._along(total, among))
        return torch.stack(found)

    def _along(self, gradient: Tensors, among: Sequence[int]) -> Tensor:
        """A gradient by the mixed tensors, along each task's."""
        products = [[(gradient[name] * t).sum() for name, t in self.tensors(task).items()] for task in among]
        return torch.stack([torch.stack(of_task).sum() for of_task in products])


def _add(total: Tensors, mixed: Tensors, logits: Tensor, flow: Tensor) -> None:
    """Add the gradient of Σ logits · flow by the mixed tensors."""
    gradients = torch.autograd.grad(logits, list(mixed.values()), flow, retain_graph=True, allow_unused=True)
    for name, gradient in zip(mixed, gradients, strict=True):
        if gradient is not None:
            total[name] += gradient


def scaled(x: Tensor, scaling: Scaling) -> Tensor:
    """x · factor + offset."""
    return x * scaling[0] + scaling[1]


def resized(head: Tensor, classes: int, outputs: int) -> Tensor:
    """The head's first so many outputs, and their mean for those that are missing."""
    own = head[:classes]
    return torch.cat([own, own.mean(0, keepdim=True).expand(outputs - classes, *own.shape[1:])])


_NORMS = {norm: signature(norm) for norm in (functional.batch_norm, functional.instance_norm)}


class _PlainNorms(TorchFunctionMode):
    """Norms with running statistics, written out: torch takes those statistics for constants.

    Forward mode drops their part of the derivative without a word, and backward refuses them.
    """

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self._of_batch = of_batch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS:
            given = _NORMS[func].bind(*args, **kwargs)
            given.apply_defaults()
            of = given.arguments
            if not of.get("training", of.get("use_input_stats")):
                x, statistics = of["input"], (of["running_mean"], of["running_var"])
                if self._of_batch and func is functional.batch_norm:
                    places = [0, *range(2, x.ndim)]
                    statistics = x.mean(places), x.var(places, unbiased=False)
                return normalised(x, *statistics, of["weight"], of["bias"], of["eps"])
        return func(*args, **kwargs)


def normalised(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias for each channel, the second dimension."""
    places = (1, -1, *[1] * (x.ndim - 2))
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    scaled = (x - mean.view(places)) * scale.view(places)
    return scaled if bias is None else scaled + bias.view(places)
