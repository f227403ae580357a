"""Runs a module on tensors that are passed in: a skeleton without storage, one call at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from exssnet.engine import convolution
from exssnet.engine.cpu import linear
from exssnet.engine.execution import PLAIN, Execution
from exssnet.engine.kernels import is_rehearsing, rehearse
from exssnet.errors import InputError

Call = Callable[[dict[str, Tensor], Tensor], Tensor]
Options = dict[str, str | int | bool | Callable[..., Any]]


class _Form:
    """The skeleton in the form of one execution, and what was compiled of it."""

    def __init__(self, skeleton: nn.Module, execution: Execution, convolutions: Collection[str]) -> None:
        self.skeleton, self.execution = skeleton, execution
        self.narrow = convolution.fit(skeleton, convolutions, execution)
        if execution.masked_linear:
            linear.fit(skeleton)
        self.lock = threading.RLock()  # tensors are put into the one skeleton
        self._places = _places(skeleton)
        self.compiled: Call | None = None
        self.rehearsed: set[tuple[torch.Size, bool]] = set()
        if execution.compiled_batch:
            compiled = torch.compile(self._traced, dynamic=False, options=_compiler_options())

            def called(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
                with torch._dynamo.config.patch(recompile_limit=1000):  # every thread has its own; heads differ in size
                    out: Tensor = compiled(tensors, x)
                return out

            self.compiled = called

    def call(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The skeleton's output under these tensors, as `functional_call` gives it, at less cost."""
        empty = [holder[short] for holder, short, _ in self._places]
        try:
            for holder, short, name in self._places:
                holder[short] = tensors[name]
            return self._finished(self.skeleton(self._ordered(x)))
        finally:
            for (holder, short, _), tensor in zip(self._places, empty, strict=True):
                holder[short] = tensor

    def _traced(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The same in the words that the compiler knows."""
        return self._finished(functional_call(self.skeleton, tensors, (self._ordered(x),)))

    def _ordered(self, x: Tensor) -> Tensor:
        last = self.execution.channels_last and x.ndim == 4
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def _finished(self, output: Any) -> Tensor:
        out: Tensor = getattr(output, "logits", output)
        # the loss and the choice of a class are never in a low precision
        return out if self.execution.autocast is None else out.float()

    def rehearse(self, tensors: Mapping[str, Tensor], x: Tensor, fixed: Collection[str]) -> None:
        """Before the first call with inputs of a shape: compile our kernels for it, all at the same time."""
        backward = torch.is_grad_enabled()
        if not self.narrow or (x.shape, backward) in self.rehearsed:
            return
        self.rehearsed.add((x.shape, backward))
        kept = {name: tensor.detach() for name, tensor in tensors.items()}  # at its place: kernels depend on it
        moving = {name: tensor.clone() for name, tensor in kept.items() if name not in fixed}
        stand_in = {name: t.requires_grad_(tensors[name].requires_grad) for name, t in (kept | moving).items()}

        def pass_through() -> None:
            out = self.call(stand_in, x)
            if backward and out.requires_grad:
                out.sum().backward()  # type: ignore[no-untyped-call]

        rehearse(x.device, pass_through)


@cache
def prepare_compiler() -> None:
    """Import the compiler and start the processes that it compiles in, beside what this thread does next."""

    def prepare() -> None:
        import_module("torch._inductor.compile_fx")
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()

    threading.Thread(target=prepare, daemon=True).start()


def _compiler_options() -> Options:
    from torch._inductor import config

    # work on the second stream of a captured step (engine/cuda/second_stream.py) reads buffers later
    options: Options = {"allow_buffer_reuse": False, "inplace_buffers": False}
    if hasattr(config, "deterministic"):  # the order of sums must not follow from a timing
        options["deterministic"] = True
    if hasattr(config.triton, "mix_order_reduction"):  # it fails on gates that depend on the example (torch 2.11)
        options["triton.mix_order_reduction"] = False
    return options


_forms: dict[Execution, _Form] = {}  # of the executions that name a structure: shared by all networks that have it


class _Seen(BaseException):
    """All that was wanted of a module's run is there; nothing that the module may want to handle."""


class Runner:
    """A copy of a module that holds no numbers: structure only, on the `meta` device."""

    def __init__(self, module: nn.Module, still: tuple[str, ...]) -> None:
        self._skeleton = _skeleton(module)
        self._unread = _take_out_unread(self._skeleton)
        self._still = still  # submodules that stay in evaluation mode
        self.execute(PLAIN)

    def execute(self, execution: Execution, convolutions: Collection[str] = ()) -> None:
        """Compute this way from now on; `convolutions` are the layers whose form may be chosen."""
        form = _forms.get(execution)
        if form is None:
            form = _Form(copy.deepcopy(self._skeleton), execution, convolutions)
            if execution.structure:
                form = _forms.setdefault(execution, form)
        self._form, self._convolutions = form, tuple(convolutions)

    def __getstate__(self) -> dict[str, Any]:
        """Without the form, which has a lock and compiled code; a copy makes its own."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_form"}
        return kept | {"execution": self.execution}

    def __setstate__(self, state: dict[str, Any]) -> None:
        execution = state.pop("execution")
        self.__dict__.update(state)
        self.execute(execution, self._convolutions)

    @property
    def skeleton(self) -> nn.Module:
        """The structure in its plain form, in evaluation mode; not to be changed."""
        return self._skeleton

    @property
    def execution(self) -> Execution:
        return self._form.execution

    @property
    def narrow(self) -> set[str]:
        """The convolutions that are not filled up."""
        return self._form.narrow

    @property
    def capturable(self) -> bool:
        """Whether a step can be part of a CUDA graph: a norm layer without a momentum reads its counter on the host."""
        norms = (part for part in self._skeleton.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
        return all(norm.momentum is not None or not norm.track_running_stats for norm in norms)

    def run(self, tensors: dict[str, Tensor], x: Tensor, *, training: bool, fixed: Mapping[str, Tensor]) -> Tensor:
        """The module's output under these tensors; `fixed` are those that it must leave as they are."""
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self._unread}
        versions = {name: tensor._version for name, tensor in fixed.items()}
        form, low = self._form, self.execution.autocast
        call: Call = form.call
        if training and form.compiled is not None and len(x) == self.execution.compiled_batch:
            call = form.compiled  # an epoch's last, smaller batch is not worth a compilation
        with form.lock, torch.autocast(x.device.type, low, enabled=low is not None, cache_enabled=False):
            self._set_training(training)
            if x.is_cuda and is_rehearsing():
                call = form.call  # a whole step is being rehearsed; to compile would take as long as in earnest
                form.rehearsed.add((x.shape, torch.is_grad_enabled()))
            else:
                form.rehearse(tensors, x, fixed)
            out = call(tensors, x)
        for name, version in versions.items():
            if fixed[name]._version != version:
                raise InputError(
                    f"the module changes its tensor '{name}' while it runs, so that tasks would disturb each other: "
                    f"make it a buffer that changes in training only"
                )
        return out

    def inputs_of(self, layer: str, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """What a layer sees in evaluation mode when it is first called. Neither it nor what follows is computed."""
        seen: list[Tensor] = []

        def look(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            seen.append(args[0] if args else next(iter(named.values())))
            if not (x.is_cuda and is_rehearsing()):
                raise _Seen

        with self._form.lock:
            hook = self._form.skeleton.get_submodule(layer).register_forward_pre_hook(look, with_kwargs=True)
            try:
                self.run(tensors, x, training=False, fixed={})
            except _Seen:
                pass
            finally:
                hook.remove()
        return seen[-1]  # before it, what a rehearsal may have shown

    def bake(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A plain module with these tensors in it, in evaluation mode; tied tensors stay tied."""
        baked = copy.deepcopy(self._skeleton)
        parameters = {
            id(old): nn.Parameter(tensors[name].detach().clone(), old.requires_grad)
            for name, old in baked.named_parameters()
        }
        for name in self._unread:
            place, _, short = name.rpartition(".")
            baked.get_submodule(place)._buffers[short] = torch.empty_like(tensors[name], device="meta")
        buffers = {id(old): tensors[name].clone() for name, old in baked.named_buffers()}
        for owner in baked.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                owner._parameters[name] = parameters[id(parameter)]
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                owner._buffers[name] = buffers[id(buffer)]
        return baked.eval()

    def _set_training(self, training: bool) -> None:
        skeleton = self._form.skeleton
        if skeleton.training != training:
            skeleton.train(training)
            for name in self._still:
                skeleton.get_submodule(name).eval()


def _places(skeleton: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Where tensors are put: a submodule's parameters or buffers, the name there, and the whole name."""
    names = {id(tensor): name for name, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers())}
    return [
        (held, short, names[id(tensor)])  # of a tensor in several places, the name is that of the first
        for part in skeleton.modules()
        for held in (part._parameters, part._buffers)
        for short, tensor in held.items()
        if tensor is not None
    ]


def _take_out_unread(skeleton: nn.Module) -> set[str]:
    """Names of the batch counters that no computation reads: a norm layer with a fixed momentum only counts up.

    Taken out of the skeleton, they cost no step anything and no task a private tensor.
    """
    unread = set()
    for name, part in skeleton.named_modules():
        norm = isinstance(part, nn.modules.batchnorm._NormBase)
        if norm and part.momentum is not None and part.num_batches_tracked is not None:
            unread.add(f"{name}.num_batches_tracked" if name else "num_batches_tracked")
            part.num_batches_tracked = None
    return unread


def _skeleton(module: nn.Module) -> nn.Module:
    """A deep copy with meta tensors, one for each tensor of the module, so that what is tied stays tied."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        skeleton: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"the module cannot be copied ({why}): keep locks, files and results of computations out of its attributes"
        ) from error
    return skeleton.eval()
