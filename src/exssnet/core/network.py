"""One set of weights, many tasks: the state that masks select from, and the proof that it stays.

A `MaskedNetwork` holds a module's tensors beside the module: the masked weights as one vector, the masks of all
tasks in a bank, each task's private tensors, and everything frozen. The module itself is a skeleton without
storage; tensors are passed in for every call.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from exssnet.core import initialise
from exssnet.core.bank import Bank
from exssnet.core.execution import Arrange, Execution
from exssnet.core.partition import partition
from exssnet.core.proof import Verification, combined_digest, tensor_digest
from exssnet.core.selection import keep_counts, keep_only
from exssnet.errors import ForgettingError, InputError

INITS = ("signed", "keep")


@dataclass
class LearnedTask:
    """What is known of a task for good: a card that can be written as JSON, and its own tensors."""

    name: str
    classes: int
    overlap: float | None  # with all earlier masks; None for the first task
    trained_weights: int  # how many shared weights this task was the one to train
    digests: dict[str, str]  # per effective weight tensor and private tensor, as learned
    kept: str  # digest of what is stored for this task alone: mask bits and private tensors
    private: dict[str, Tensor] = field(repr=False)

    @property
    def digest(self) -> str:
        return combined_digest(self.digests)

    def card(self) -> dict[str, Any]:
        card = asdict(self)
        del card["private"]
        return card


class MaskedNetwork:
    """Any module, its shared weights, and the tasks learned on them."""

    def __init__(
        self,
        module: nn.Module,
        density: float = 0.1,
        seed: int = 0,
        *,
        init: str = "signed",
        private: Collection[str] = (),
        head: str = "shared",
        head_layer: str | None = None,
    ) -> None:
        if init not in INITS:
            raise InputError(f"init is '{init}': choose one of {', '.join(INITS)}")
        self.density, self.seed = density, seed
        self.partition = partition(module, private, head, head_layer)
        self.layout = self.partition.masked
        self.keep = keep_counts(self.layout, density)

        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        own = self.layout.vector(parameters)
        signed = initialise.signed_constant(self.layout, seed).to(own)
        self.weights = own if init == "keep" else signed
        self.frozen = {name: parameters[name] for name in self.partition.frozen}
        self.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        self.private_start = {name: parameters[name] for name in self.partition.private}
        self.skeleton = copy.deepcopy(module).to("meta")
        self.execute(Execution())

        self.bank = Bank(self.layout.size, self.weights.device)
        self.tasks: dict[str, LearnedTask] = {}
        self._used_digests: dict[str, str] = {}
        self._effective: tuple[str, Tensor] | None = None  # the task asked for last

    def execute(self, execution: Execution) -> None:
        """Compute this way from now on."""
        self.execution = execution
        self._effective = None
        places = self.layout.places(execution.channels_last).to(self.weights.device)
        self.places = places  # where each weight lies in an arranged vector
        self._sources = places.argsort()
        self._compiled = torch.compile(self._call, dynamic=False) if execution.compiled else self._call

    @property
    def device(self) -> torch.device:
        return self.weights.device

    # --- running -----------------------------------------------------------------------------------------

    def arrange(self, vector: Tensor) -> Tensor:
        """Weights in the order of memory in which the module runs."""
        if self.execution.channels_last:
            vector = Arrange.apply(vector, self._sources, self.places)  # type: ignore[no-untyped-call]
        return vector

    def run(self, arranged: Tensor, own: Mapping[str, Tensor], classes: int, x: Tensor, *, training: bool) -> Tensor:
        """Logits [B, classes] of the module under these weights, arranged, and own tensors."""
        if self.skeleton.training != training:
            self.skeleton.train(training)
        if self.execution.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        low = self.execution.autocast
        shared = self.layout.tensors(arranged.to(low or arranged.dtype), channels_last=self.execution.channels_last)
        with torch.autocast(self.device.type, low, enabled=low is not None, cache_enabled=False):
            call = self._compiled if training else self._call
            logits = call(self._tensors(shared, own, classes), x)
        if logits.ndim != 2 or logits.shape[1] != classes:
            raise InputError(
                f"the module returns shape {tuple(logits.shape)} for a task of {classes} classes: it must return "
                f"[batch, classes]; if '{self.partition.head}' is not its last layer, name that one as head_layer"
            )
        return logits

    def _call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        out = functional_call(self.skeleton, tensors, (x,))
        return getattr(out, "logits", out)  # type: ignore[no-any-return]

    def _tensors(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], classes: int) -> dict[str, Tensor]:
        tensors = {**self.frozen, **self.buffers, **own, **shared}
        for name in (f"{self.partition.head}.weight", f"{self.partition.head}.bias"):
            if name in tensors and len(tensors[name]) > classes:
                tensors[name] = tensors[name][:classes]  # a shared head may have more outputs than the task
        return tensors

    def logits(self, x: Tensor, task: str) -> Tensor:
        learned = self.task(task)
        with torch.no_grad():
            return self.run(self.arranged(task), learned.private, learned.classes, x, training=False)

    def features(self, x: Tensor, task: str) -> Tensor:
        """What the head layer sees under the task's subnetwork, flattened to [B, features]."""
        seen: list[Tensor] = []
        head = self.skeleton.get_submodule(self.partition.head)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.logits(x, task)
        finally:
            hook.remove()
        return seen[-1].flatten(1)

    def task(self, name: str) -> LearnedTask:
        if name not in self.tasks:
            known = ", ".join(self.tasks) or "none yet"
            raise InputError(f"no task '{name}' has been learned (learned: {known})")
        return self.tasks[name]

    def mask(self, task: str) -> Tensor:
        self.task(task)
        return self.bank.mask(list(self.tasks).index(task))

    def arranged(self, task: str) -> Tensor:
        """The shared weights under the task's mask, as the module runs with them."""
        if self._effective is None or self._effective[0] != task:
            self._effective = (task, self.arrange(keep_only(self.weights, self.mask(task))))
        return self._effective[1]

    def effective(self, task: str) -> dict[str, Tensor]:
        """The shared weights under the task's mask, by name: what is baked, and what the digests are of."""
        return self.layout.tensors(keep_only(self.weights, self.mask(task)))

    def bake(self, task: str) -> nn.Module:
        """A plain module with this task's effective weights and private tensors, in evaluation mode."""
        learned = self.task(task)
        tensors = self._tensors(self.effective(task), learned.private, learned.classes)
        baked = copy.deepcopy(self.skeleton)
        # by the tensor it replaces, so that tied tensors stay tied
        parameters = {
            id(old): nn.Parameter(tensors[name].detach().clone(), old.requires_grad)
            for name, old in baked.named_parameters()
        }
        buffers = {id(old): tensors[name].clone() for name, old in baked.named_buffers()}
        for owner in baked.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                owner._parameters[name] = parameters[id(parameter)]
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                owner._buffers[name] = buffers[id(buffer)]
        head = baked.get_submodule(self.partition.head)
        for attribute in ("out_features", "out_channels"):
            if hasattr(head, attribute):
                setattr(head, attribute, learned.classes)
        return baked.eval()

    # --- learning ----------------------------------------------------------------------------------------

    def start_private(self, task: str, classes: int) -> dict[str, Tensor]:
        """A new task's own tensors: private parameters (trainable) and a copy of every buffer."""
        head = self.skeleton.get_submodule(self.partition.head)
        own: dict[str, Tensor] = {}
        for name, value in self.private_start.items():
            owner, _, short = name.rpartition(".")
            if self.partition.head_is_private and owner == self.partition.head:
                fan_in = head.get_parameter("weight")[0].numel()
                value = initialise.fresh_head(value, classes, fan_in, self.seed, task, short).to(self.device)
            own[name] = value.clone().requires_grad_(value.is_floating_point())
        return own | {name: buffer.clone() for name, buffer in self.buffers.items()}

    def check_new(self, task: str, classes: int) -> None:
        """Refuse a task that cannot be added: its name is taken, or the shared head has too few outputs."""
        if task in self.tasks:
            raise InputError(f"task '{task}' has been learned already: choose another name")
        if classes < 2:
            raise InputError(f"task '{task}' has {classes} class: a task needs at least two to tell apart")
        outputs = self.skeleton.get_submodule(self.partition.head).get_parameter("weight").shape[0]
        if not self.partition.head_is_private and classes > outputs:
            raise InputError(
                f"task '{task}' has {classes} classes but the shared head has {outputs} outputs: "
                f"build the module with at least {classes}, or use head='task'"
            )

    def check_input(self, x: Tensor, classes: int) -> None:
        """Refuse inputs that the module cannot take, or outputs that are no logits."""
        own = self.start_private("", classes)
        try:
            with torch.no_grad():
                self.run(self.arrange(self.weights), own, classes, x, training=False)
        except (RuntimeError, IndexError, TypeError) as error:
            raise InputError(
                f"the module cannot take inputs of shape {list(x.shape[1:])}: {' '.join(str(error).split())}"
            ) from error

    def commit(
        self, task: str, classes: int, mask: Tensor, index: Tensor, values: Tensor, own: Mapping[str, Tensor],
        *, exclusive: bool = True,
    ) -> LearnedTask:  # fmt: skip
        """Add a learned task: `values` become the shared weights at `index`, the mask goes into the bank.

        Afterwards every earlier task is checked against its digest. Their masks lie inside the used set, so one
        digest of the used weights covers them all: the check costs the same for the second task and the thousandth.
        """
        self.check_new(task, classes)
        self._effective = None
        self.weights[index] = values.detach()
        if exclusive:
            self._check_earlier()
        private = {n: t.detach().clone() for n, t in own.items() if n not in self.buffers or self._moved(n, t)}
        overlap = self.bank.overlap(mask)
        self.bank.add(mask)
        learned = LearnedTask(task, classes, overlap, len(index), {}, "", private)
        self.tasks[task] = learned
        learned.digests = self._digests(task)
        learned.kept = self._kept(len(self.tasks) - 1, learned)
        self._used_digests = self._digests_of_used()
        return learned

    def _moved(self, name: str, value: Tensor) -> bool:
        """Whether learning changed a buffer; then it is the task's own (norm statistics, above all)."""
        return not torch.equal(value, self.buffers[name])

    # --- proof -------------------------------------------------------------------------------------------

    def verify(self) -> Verification:
        """Recompute every task's digests from the tensors as they are now."""
        changed = []
        for name, learned in self.tasks.items():
            now = self._digests(name)
            differs = {t for t in now.keys() | learned.digests.keys() if now.get(t) != learned.digests.get(t)}
            changed += [(name, tensor) for tensor in sorted(differs)]
        return Verification({name: learned.digest for name, learned in self.tasks.items()}, tuple(changed))

    def _digests(self, task: str) -> dict[str, str]:
        tensors = self.effective(task) | self.tasks[task].private
        return {name: tensor_digest(tensor) for name, tensor in tensors.items()}

    def _digests_of_used(self) -> dict[str, str]:
        used = self.layout.tensors(keep_only(self.weights, self.bank.used))
        return {name: tensor_digest(tensor) for name, tensor in used.items()}

    def _kept(self, index: int, learned: LearnedTask) -> str:
        kept = [self.bank.packed(index), *learned.private.values()]
        return tensor_digest(torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in kept]))

    def _check_earlier(self) -> None:
        if not self.tasks:
            return
        kept = all(self._kept(i, learned) == learned.kept for i, learned in enumerate(self.tasks.values()))
        if kept and self._digests_of_used() == self._used_digests:
            return
        self.verify().require()
        raise ForgettingError("weights used by earlier tasks changed, though no task's digest differs")

    # --- moving and storing ------------------------------------------------------------------------------

    def to(self, device: str | torch.device) -> MaskedNetwork:
        self._effective = None
        self.weights = self.weights.to(device)
        self.bank.to(device)
        self.places, self._sources = self.places.to(device), self._sources.to(device)
        for group in (self.frozen, self.buffers, self.private_start, *(t.private for t in self.tasks.values())):
            group.update({name: tensor.to(device) for name, tensor in group.items()})
        return self

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """All that learning has changed: tensors by name, and the tasks' cards (JSON)."""
        tensors = {"weights": self.weights}
        for index, learned in enumerate(self.tasks.values()):
            tensors[f"task.{index}.mask"] = self.bank.packed(index)
            tensors |= {f"task.{index}.private.{name}": tensor for name, tensor in learned.private.items()}
        return tensors, [learned.card() for learned in self.tasks.values()]

    def load_state(self, tensors: Mapping[str, Tensor], cards: list[dict[str, Any]]) -> None:
        """Take over what `state` gave, on a network built the same way, and verify it."""
        self._effective = None
        self.weights = tensors["weights"].to(self.device).clone()
        self.bank.load([tensors[f"task.{index}.mask"] for index in range(len(cards))])
        self.tasks = {}
        for index, card in enumerate(cards):
            prefix = f"task.{index}.private."
            private = {n.removeprefix(prefix): t.to(self.device) for n, t in tensors.items() if n.startswith(prefix)}
            self.tasks[card["name"]] = LearnedTask(**card, private=private)
        self._used_digests = self._digests_of_used()
