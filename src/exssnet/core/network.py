"""One set of weights, many tasks: the state that masks select from, and the proof that it stays.

A `MaskedNetwork` holds a module's tensors beside the module: the masked weights as one vector, the masks of all
tasks in a bank, each task's private tensors, and everything frozen. The module itself runs on tensors passed in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from exssnet.core import init as initialise
from exssnet.core.bank import Bank
from exssnet.core.module.accept import accepted
from exssnet.core.module.skeleton import Runner
from exssnet.core.partition import partition
from exssnet.core.proof import Turns, Verification, combined_digest, differing, digests_of, tensor_digest
from exssnet.core.selection import keep_counts, keep_only
from exssnet.core.weight_cache import Ready, Weights, locked
from exssnet.engine.cpu import linear
from exssnet.engine.cuda import second_stream as side
from exssnet.engine.execution import PLAIN, Execution
from exssnet.engine.memory_format import arrange
from exssnet.errors import ForgettingError, InputError

DRAWN = {"signed": initialise.signed_constant, "hashed": initialise.hashed_signs}
INITS = (*DRAWN, "keep")
ALL_TASKS = "(shared by all tasks)"


@dataclass
class LearnedTask:
    """What is known of a task for good: a card that can be written as JSON, and its own tensors."""

    name: str
    classes: int
    lender: str | None  # the earlier task whose mask started this one
    overlap: float | None  # with all earlier masks; None for the first task
    trained_weights: int  # how many shared weights this task was the one to train
    digests: dict[str, str] = field(repr=False)  # per effective weight tensor and private tensor, as learned
    kept: str = field(repr=False)  # digest of what is stored for this task alone: mask bits and private tensors
    private: dict[str, Tensor] = field(repr=False)
    # where, and with which values, it differs from the shared weights, having been learned elsewhere
    apart: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        return combined_digest(self.digests)

    def card(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("private", "apart")}


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
        self.weights = given if init == "keep" else DRAWN[init](self.layout, seed).to(given)
        self.frozen = {name: parameters[name] for name in self.partition.frozen}
        self.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        self.private_start = {name: parameters[name] for name in self.partition.private}
        self.outputs = len(parameters.get(f"{self.partition.head}.weight", ()))  # of the head; 0: tied to another layer
        self.runner = Runner(module, self.partition.still)
        self.ready = Ready(self._weights_of)

        self.bank = Bank(self.layout.size, self.weights.device)
        self.tasks: dict[str, LearnedTask] = {}
        self._turns = Turns()
        self._used_digests: dict[str, str] = {}
        self.seal()
        self.execute(PLAIN)

    def set_density(self, density: float) -> None:
        """The share of each layer's weights that the masks of new tasks keep."""
        self.keep, self.density = keep_counts(self.layout, density), density

    def seal(self) -> None:
        """From now on what all tasks share has to stay as it is."""
        self._shared_digests = digests_of(self.frozen | self.buffers)

    def execute(self, execution: Execution) -> None:
        """Compute this way from now on."""
        self.arrangement = arrange(self.runner, self.layout, execution, self.weights.device)
        self.ready.let_go()

    @property
    def execution(self) -> Execution:
        return self.runner.execution

    @property
    def device(self) -> torch.device:
        return self.weights.device

    # --- running -----------------------------------------------------------------------------------------

    def run(
        self, layers: Mapping[str, Tensor], own: Mapping[str, Tensor], classes: int, x: Tensor, *, training: bool
    ) -> Tensor:
        """Logits [B, classes] of the module under these weights by layer, as it runs with them, and own tensors."""
        tensors = self._tensors(layers, own, classes)
        fixed = {**self.frozen, **layers} if training else tensors
        logits = self.runner.run(tensors, self.input(x), training=training, fixed=fixed)
        if logits.ndim != 2 or logits.shape[1] != classes:
            raise InputError(
                f"the module returns shape {tuple(logits.shape)} for a task of {classes} classes: it must return "
                f"[batch, classes]; if '{self.partition.head}' is not its last layer, name that one as head_layer"
            )
        return logits

    def layers(self, arranged: Tensor) -> dict[str, Tensor]:
        """Arranged weights by layer, as the module runs with them."""
        return self.arrangement.tensors(arranged.to(self.execution.autocast or arranged.dtype))

    def _tensors(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], classes: int) -> dict[str, Tensor]:
        tensors = {**self.frozen, **self.buffers, **own, **shared}
        for name in (f"{self.partition.head}.weight", f"{self.partition.head}.bias"):
            if name in tensors and len(tensors[name]) > classes:
                tensors[name] = side.joined(tensors[name][:classes])  # a shared head may have more outputs
        return tensors

    def logits(self, x: Tensor, task: str) -> Tensor:
        learned = self.task(task)
        with torch.no_grad():
            return self.run(self.ready(task), learned.private, learned.classes, x, training=False)

    def features(self, x: Tensor, task: str) -> Tensor:
        """What the head layer sees under the task's subnetwork, flattened to [B, features]."""
        with torch.no_grad():
            return self.runner.inputs_of(self.partition.head, self.tensors(task), self.input(x)).flatten(1)

    def tensors(self, task: str) -> dict[str, Tensor]:
        """All tensors of the module under a task, as it runs with them."""
        learned = self.task(task)
        return self._tensors(self.ready(task), learned.private, learned.classes)

    def input(self, x: Tensor) -> Tensor:
        """In the weights' number type; indices, such as tokens, as they are."""
        return x.to(self.weights.dtype) if x.is_floating_point() else x

    def task(self, name: str) -> LearnedTask:
        if name not in self.tasks:
            known = ", ".join(self.tasks) or "none yet"
            raise InputError(f"no task '{name}' has been learned (learned: {known})")
        return self.tasks[name]

    def mask(self, task: str) -> Tensor:
        self.task(task)
        return self.bank.mask(list(self.tasks).index(task))

    def _weights_of(self, tasks: Sequence[str]) -> list[Weights]:
        """The shared weights under the tasks' masks."""
        masked = self._masked(tasks)
        rows = masked.to(self.execution.autocast or masked.dtype)  # all at once: a launch each would take longer
        made = [self.layers(self.arrangement(row)) for row in rows]
        if self.execution.masked_linear:
            linear.pass_over_zeros(weight for weights in made for weight in weights.values())
        return made

    @locked
    def _masked(self, tasks: Sequence[str]) -> Tensor:
        """The vectors of weights as the tasks see them, one in a row."""
        learned = [self.task(task) for task in tasks]
        places = {name: place for place, name in enumerate(self.tasks)}
        masked = keep_only(self.weights, self.bank.masks(places[task] for task in tasks))
        for row, task in zip(masked, learned, strict=True):
            if task.apart is not None:
                row[task.apart[0]] = task.apart[1]
        return masked

    def effective(self, task: str) -> dict[str, Tensor]:
        """The shared weights under the task's mask, by name: what is baked, and what the digests are of."""
        return self.layout.tensors(self._masked([task])[0])

    def bake(self, task: str) -> nn.Module:
        """A plain module with this task's effective weights and private tensors, in evaluation mode."""
        learned = self.task(task)
        baked = self.runner.bake(self._tensors(self.effective(task), learned.private, learned.classes))
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
                value = initialise.fresh_head(value, classes, fan_in, self.seed, task, short).to(self.device)
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

    def check_input(self, x: Tensor, classes: int, *, training: bool = False) -> None:
        """Refuse inputs that the module cannot take, or outputs that are no logits."""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[self.device] if x.is_cuda else []):
                layers = self.layers(self.arrangement(self.weights.clone()))  # another thread may learn
                self.run(layers, self.start_private("", classes), classes, x, training=training)
        except InputError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            where = f"a training batch of {len(x)}, of shape" if training else "inputs of shape"
            why = " ".join(str(error).split())
            raise InputError(f"the module cannot take {where} {list(x.shape[1:])}: {why}") from error

    @locked
    def commit(
        self, task: str, classes: int, mask: Tensor, index: Tensor, values: Tensor, own: Mapping[str, Tensor],
        *, lender: str | None = None, exclusive: bool = True,
    ) -> LearnedTask:  # fmt: skip
        """Add a learned task: `values` become the shared weights at `index`, the mask goes into the bank.

        Afterwards the earlier tasks are checked. Their masks lie inside the used set, so one digest of the used
        weights covers them all, however many there are. What is stored for a task alone, its bits and private
        tensors, no training touches; so those of some tasks are checked each time, in turn, and all by `verify`.
        """
        self.check_new(task, classes)
        self.weights[index] = values.detach()
        self.ready.let_go()
        if exclusive:
            self._check_earlier()
        private = {n: t.detach().clone() for n, t in own.items() if n not in self.buffers or self._moved(n, t)}
        overlap = self.bank.overlap(mask)
        self.bank.add(mask)
        self.tasks[task] = learned = LearnedTask(task, classes, lender, overlap, len(index), {}, "", private)
        learned.digests = self._digests_of(task)
        learned.kept = self._kept(len(self.tasks) - 1, learned)
        self._used_digests = self._digests_of_used()
        return learned

    @locked
    def remove(self, task: str, first: Tensor) -> None:
        """Take a task out. Weights that no other task reads get their first values back and are free again."""
        self.task(task)
        index = list(self.tasks).index(task)
        mask = self.mask(task)
        self.bank.remove(index)
        del self.tasks[task]
        self.ready.let_go()
        alone = mask & ~self._read()
        self.weights[alone] = first.to(self.weights)[alone]
        self.verify().require()
        self._used_digests = self._digests_of_used()

    def _read(self) -> Tensor:
        """The shared weights that some task computes with: those of all masks, but for what a task has apart."""
        read = torch.zeros_like(self.bank.used)
        for index, learned in enumerate(self.tasks.values()):
            mask = self.bank.mask(index)
            if learned.apart is not None:
                mask[learned.apart[0]] = False
            read |= mask
        return read

    @locked
    def adopt(
        self, card: Mapping[str, Any], mask: Tensor, masked: Tensor, private: Mapping[str, Tensor]
    ) -> LearnedTask:
        """Add a task that was learned on another network with the same first weights; `masked` are its weights.

        Where a weight of its mask is free here it becomes the task's own. Where it is another task's and has another
        value here, the task keeps its own beside the shared one.
        """
        self.check_new(card["name"], card["classes"])
        mask, masked = mask.to(self.device), masked.to(self.weights)
        free = self.bank.free(mask)
        self.weights[free] = masked[free]
        apart = (mask & (self.weights != masked)).nonzero().view(-1)
        overlap = self.bank.overlap(mask)
        self.bank.add(mask)
        self.ready.let_go()
        own = {name: tensor.to(self.device) for name, tensor in private.items()}
        learned = LearnedTask(**card, private=own, apart=(apart, masked[apart]) if len(apart) else None)
        learned.overlap, learned.trained_weights = overlap, int(free.count_nonzero())
        self.tasks[learned.name] = learned
        learned.kept = self._kept(len(self.tasks) - 1, learned)
        self.verify().require()
        self._used_digests = self._digests_of_used()
        return learned

    def _moved(self, name: str, value: Tensor) -> bool:
        """Whether learning changed a buffer; then it is the task's own (norm statistics, above all)."""
        return not torch.equal(value, self.buffers[name])

    # --- proof -------------------------------------------------------------------------------------------

    def verify(self) -> Verification:
        """Recompute every task's digests, and those of what all tasks share, from the tensors as they are now."""
        changed = [
            (ALL_TASKS, name) for name in differing(digests_of(self.frozen | self.buffers), self._shared_digests)
        ]
        found = {}
        for name, learned in list(self.tasks.items()):
            with self.ready.lock:  # for a task at a time: others want to be asked meanwhile
                if self.tasks.get(name) is learned:
                    found[name] = learned.digest
                    changed += [(name, tensor) for tensor in differing(self._digests_of(name), learned.digests)]
        return Verification(found, tuple(changed))

    def _digests_of(self, task: str) -> dict[str, str]:
        return digests_of(self.effective(task) | self.tasks[task].private)

    def _digests_of_used(self) -> dict[str, str]:
        return digests_of(self.layout.tensors(keep_only(self.weights, self.bank.used)))

    def _kept(self, index: int, learned: LearnedTask) -> str:
        own = [learned.private[name] for name in sorted(learned.private)]  # a checkpoint has them in another order
        kept = [self.bank.packed(index), *own, *(learned.apart or ())]
        return tensor_digest(torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in kept]))

    def _check_earlier(self) -> None:
        if not self.tasks:
            return
        places = {name: place for place, name in enumerate(self.tasks)}
        turn = self._turns.take(self.tasks)
        kept = all(self._kept(places[name], self.tasks[name]) == self.tasks[name].kept for name in turn)
        shared = digests_of(self.frozen | self.buffers) == self._shared_digests
        if kept and shared and self._digests_of_used() == self._used_digests:
            return
        self.verify().require()
        raise ForgettingError("weights used by earlier tasks changed, though no task's digest differs")

    # --- moving and storing ------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> MaskedNetwork:
        self.ready.let_go()
        self.weights = self.weights.to(device)
        self.bank.to(device)
        self.arrangement.to(device)
        for group in (self.frozen, self.buffers, self.private_start, *(t.private for t in self.tasks.values())):
            group.update({name: tensor.to(device) for name, tensor in group.items()})
        for learned in self.tasks.values():
            if learned.apart is not None:
                learned.apart = (learned.apart[0].to(device), learned.apart[1].to(device))
        return self

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """All that learning has changed: tensors by name, and the tasks' cards (JSON)."""
        tensors = {"weights": self.weights}
        for index, learned in enumerate(self.tasks.values()):
            tensors[f"task.{index}.mask"] = self.bank.packed(index)
            tensors |= {f"task.{index}.private.{name}": tensor for name, tensor in learned.private.items()}
            if learned.apart is not None:
                tensors |= {f"task.{index}.apart.{i}": tensor for i, tensor in enumerate(learned.apart)}
        return tensors, [learned.card() for learned in self.tasks.values()]

    @locked
    def load_state(self, tensors: Mapping[str, Tensor], cards: list[dict[str, Any]]) -> None:
        """Take over what `state` gave, on a network built the same way. The caller verifies it."""
        self.ready.let_go()
        self.weights = tensors["weights"].to(self.device).clone()
        self.bank.load([tensors[f"task.{index}.mask"] for index in range(len(cards))])
        self.tasks = {}
        own: dict[str, dict[str, Tensor]] = defaultdict(dict)  # sorted once: there may be thousands
        for name, tensor in tensors.items():
            place, _, short = name.partition(".private.")
            own[place][short] = tensor
        for index, card in enumerate(cards):
            private = {name: tensor.to(self.device) for name, tensor in own[f"task.{index}"].items()}
            places = tensors.get(f"task.{index}.apart.0")
            values = tensors.get(f"task.{index}.apart.1")
            apart = None if places is None or values is None else (places.to(self.device), values.to(self.device))
            self.tasks[card["name"]] = LearnedTask(**card, private=private, apart=apart)
        self._turns = Turns()  # all are checked next time
        self._used_digests = self._digests_of_used()
