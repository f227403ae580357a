"""One set of weights, many tasks: the state that masks select from.

A `MaskedNetwork` holds a module's tensors next to the module: the masked weights as one vector, the masks of all
tasks in a bank, each task's private tensors, and everything frozen. The module itself runs on tensors passed in.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from exssnet.core import init as initial
from exssnet.core.bank import Bank
from exssnet.core.engine import Engine, Weights
from exssnet.core.module.accept import accepted
from exssnet.core.module.structure import Structure
from exssnet.core.partition import partition
from exssnet.core.proof import Proof, Verification, combined_digest
from exssnet.core.selection import keep_counts, keep_only
from exssnet.core.weight_cache import WeightCache
from exssnet.errors import InputError

INITS = (*initial.DRAWN, "keep")


@dataclass(eq=False)
class LearnedTask:
    """What is known of a task for good: a card that can be written as JSON, and its own tensors."""

    name: str
    classes: int
    lender: str | None  # the earlier task whose mask started this one
    overlap: float | None  # with all earlier masks; None for the first task
    trained_weights: int  # how many shared weights this task trained
    digests: dict[str, str] = field(repr=False)  # per effective weight tensor and private tensor, as learned
    kept: str = field(repr=False)  # digest of what is stored for this task alone: mask bits and private tensors
    private: dict[str, Tensor] = field(repr=False)
    # positions and values of weights that differ from the shared ones: the task was learned elsewhere
    override: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        return combined_digest(self.digests)

    def card(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("private", "override")}


class MaskedNetwork:
    """Any module, its shared weights, and the tasks learned on them."""

    def __init__(
        self, module: nn.Module, density: float = 0.1, seed: int = 0, *, init: str = "signed",
        private: Collection[str] = (), head: str = "shared", head_layer: str | None = None,
    ) -> None:  # fmt: skip
        module = accepted(module)
        if init not in INITS:
            raise InputError(f"init is '{init}': choose one of {', '.join(INITS)}")
        self.seed = seed
        self.partition = partition(module, private, head, head_layer)
        self.layout = self.partition.masked
        self.set_density(density)

        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        given = self.layout.vector(parameters)
        self.weights = given if init == "keep" else initial.DRAWN[init](self.layout, seed).to(given)
        self.frozen = {name: parameters[name] for name in self.partition.frozen}
        self.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        self.private_start = {name: parameters[name] for name in self.partition.private}
        self.outputs = len(parameters.get(f"{self.partition.head}.weight", ()))  # of the head; 0: tied to another layer
        self.head_names = (f"{self.partition.head}.weight", f"{self.partition.head}.bias")

        self.bank = Bank(self.layout.size, self.weights.device)
        self.tasks: dict[str, LearnedTask] = {}
        self.lock = threading.RLock()  # no thread sees half of a change
        self.cache = WeightCache()
        self.structure = Structure(module, self.partition.still)
        self.proof = Proof(self)
        self.use(Engine())

    def use(self, engine: Engine) -> None:
        """Compute with this engine from now on."""
        self.engine = engine
        self.runner = engine.runner(self.structure, self.layout, self.device)
        self.cache.clear()

    def set_density(self, density: float) -> None:
        """The share of each layer's weights that the masks of new tasks keep."""
        self.keep, self.density = keep_counts(self.layout, density), density

    @property
    def device(self) -> torch.device:
        return self.weights.device

    # --- running -----------------------------------------------------------------------------------------

    def run(self, weights: Weights, own: Mapping[str, Tensor], classes: int, x: Tensor, *, training: bool) -> Tensor:
        """Logits [B, classes] of the module under these weights by layer and a task's own tensors."""
        tensors, moving = self._with_shared(weights, own, classes), own if training else ()
        logits = self.runner.run(tensors, self.input(x), training=training, moving=moving)
        if logits.ndim != 2 or logits.shape[1] != classes:
            raise InputError(
                f"the module returns shape {tuple(logits.shape)} for a task of {classes} classes: it must return "
                f"[batch, classes]; if '{self.partition.head}' is not its last layer, name that one as head_layer"
            )
        return logits

    def logits(self, x: Tensor, task: str) -> Tensor:
        learned = self.task(task)
        with torch.no_grad():
            return self.run(self.masked(learned), learned.private, learned.classes, x, training=False)

    def features(self, x: Tensor, task: str) -> Tensor:
        """What the head layer sees under the task's subnetwork, flattened to [B, features]."""
        with torch.no_grad():
            return self.runner.inputs_of(self.partition.head, self.tensors(task), self.input(x)).flatten(1)

    def tensors(self, task: str) -> dict[str, Tensor]:
        """All tensors of the module under a task, as it runs with them."""
        learned = self.task(task)
        return self._with_shared(self.masked(learned), learned.private, learned.classes)

    def masked(self, learned: LearnedTask) -> Weights:
        """The shared weights under a task's mask, as the module runs with them."""
        with self.lock:
            return self.cache.get(learned, self.weights, lambda: self.runner.fixed(self.effective_vector(learned)))

    def effective(self, task: str) -> dict[str, Tensor]:
        """The shared weights under the task's mask, by name: what is baked, and what the digests are of."""
        return self.layout.tensors(self.effective_vector(self.task(task)))

    def effective_vector(self, learned: LearnedTask) -> Tensor:
        with self.lock:
            vector = keep_only(self.weights, self.bank.mask(self.position(learned.name)))
            if learned.override is not None:
                vector[learned.override[0]] = learned.override[1]
            return vector

    def _with_shared(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor], classes: int) -> dict[str, Tensor]:
        tensors = {**self.frozen, **self.buffers, **own, **weights}
        for name in self.head_names:
            if name in tensors and len(tensors[name]) > classes:
                tensors[name] = tensors[name][:classes]  # a shared head may have more outputs
        return tensors

    def input(self, x: Tensor) -> Tensor:
        """In the weights' number type; indices, such as tokens, as they are."""
        return x.to(self.weights.dtype) if x.is_floating_point() else x

    def task(self, name: str) -> LearnedTask:
        if name not in self.tasks:
            known = ", ".join(self.tasks) or "none yet"
            raise InputError(f"no task '{name}' has been learned (learned: {known})")
        return self.tasks[name]

    def position(self, task: str) -> int:
        return list(self.tasks).index(task)

    def mask(self, task: str) -> Tensor:
        self.task(task)
        return self.bank.mask(self.position(task))

    def bake(self, task: str) -> nn.Module:
        """A plain module with this task's effective weights and private tensors, in evaluation mode."""
        learned = self.task(task)
        baked = self.structure.bake(self._with_shared(self.effective(task), learned.private, learned.classes))
        head = baked.get_submodule(self.partition.head)
        for attribute in ("out_features", "out_channels"):
            if hasattr(head, attribute):
                setattr(head, attribute, learned.classes)
        return baked

    # --- learning ----------------------------------------------------------------------------------------

    def start_private(self, task: str, classes: int) -> dict[str, Tensor]:
        """A new task's own tensors: private parameters (trainable) and a copy of every buffer."""
        own: dict[str, Tensor] = {}
        for name, value in self.private_start.items():
            owner, _, short = name.rpartition(".")
            if self.partition.head_is_private and owner == self.partition.head:
                fan_in = self.private_start[f"{owner}.weight"][0].numel()
                value = initial.fresh_head(value, classes, fan_in, self.seed, task, short).to(self.device)
            own[name] = value.clone().requires_grad_(value.is_floating_point())
        return own | {name: buffer.clone() for name, buffer in self.buffers.items()}

    def check_new(self, task: str, classes: int) -> None:
        """Refuse a task that cannot be added: its name is taken, or the shared head has too few outputs."""
        if task in self.tasks:
            raise InputError(f"task '{task}' has been learned already: choose another name")
        if classes < 2:
            raise InputError(f"task '{task}' has {classes} class: a task needs at least two to tell apart")
        if not self.partition.head_is_private and 0 < self.outputs < classes:
            raise InputError(
                f"task '{task}' has {classes} classes but the shared head has {self.outputs} outputs: "
                f"build the module with at least {classes}, or use head='task'"
            )

    def commit(
        self, task: str, classes: int, mask: Tensor, index: Tensor, values: Tensor, own: Mapping[str, Tensor],
        *, lender: str | None = None, exclusive: bool = True,
    ) -> LearnedTask:  # fmt: skip
        """Add a learned task: `values` become the shared weights at `index`, the mask goes into the bank.

        A buffer that learning changed (norm statistics, above all) is the task's own from now on. With `exclusive` the
        earlier tasks are checked: a task that would change one of them is not added.
        """
        with self.lock:
            self.check_new(task, classes)
            before = self.weights[index]
            self.weights[index] = values.detach()
            if exclusive:
                try:
                    self.proof.check_earlier()
                except BaseException:
                    self.weights[index] = before
                    raise
            shared = {name for name, buffer in self.buffers.items() if torch.equal(own[name], buffer)}
            private = {name: tensor.detach().clone() for name, tensor in own.items() if name not in shared}
            overlap = self.bank.overlap(mask)
            self.bank.add(mask)
            self.tasks[task] = learned = LearnedTask(task, classes, lender, overlap, len(index), {}, "", private)
            self.proof.take(learned)
            return learned

    def verify(self) -> Verification:
        """Recompute every task's digests, and those of what all tasks share, from the tensors as they are now."""
        return self.proof.verify()

    def to(self, device: str | torch.device) -> MaskedNetwork:
        self.weights = self.weights.to(device)
        self.bank.to(device)
        for group in (self.frozen, self.buffers, self.private_start, *(t.private for t in self.tasks.values())):
            group.update({name: tensor.to(device) for name, tensor in group.items()})
        for learned in self.tasks.values():
            if learned.override is not None:
                learned.override = (learned.override[0].to(device), learned.override[1].to(device))
        self.use(self.engine)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("lock", "runner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())
        self.use(self.engine)
