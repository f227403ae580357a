"""State of a module that no tensor holds: what training changes there changes earlier tasks, and no digest sees it.

Parameters and buffers are handed in with every call, so they are known. What a module keeps elsewhere, in plain
attributes or in globals, or draws at random, is found by running copies of it on a few examples. What counts are the
answers: a counter of calls, or the last attention map, is no reason to refuse a module whose answers do not depend on
it. Whether they do is tried with other values in its path.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from exssnet.core.proof import tensor_digest
from exssnet.errors import InputError

REPEATS = 16  # evaluations that must agree where random numbers are drawn
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes that hold tensors, submodules and hooks
FAR = 1_000_003  # beyond what any counter is compared with, and odd
EMPTIED = (list, dict, set, deque, OrderedDict, Counter)
COLLECTIONS = (list, tuple, set, frozenset, deque, Mapping)
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

StatePath = tuple[str, ...]  # a submodule, one of its attributes, and what is inside that


class HiddenState:
    """Looks for it. `tensors` makes all of the module's tensors, fresh for every call.

    `still` are submodules that always stay in evaluation mode.
    """

    def __init__(
        self, skeleton: nn.Module, still: Collection[str], tensors: Callable[[], dict[str, Tensor]], examples: Tensor
    ) -> None:
        self.skeleton, self.still, self.tensors = skeleton, still, tensors
        half = len(examples) // 2 if len(examples) > 3 else len(examples)
        self.x, self.others = examples[:half], examples[-half:]
        if len(self.others) == 1:
            self.others = torch.cat([self.others, self.others])  # batch statistics need two

    def refuse(self) -> None:
        """Raise if the answers depend on anything but the tensors and the input."""
        with _own_randomness(self.x.device):
            self._look()

    def _look(self) -> None:
        module = self._fresh()
        state = _random_state(self.x.device)
        self.wanted = self._answers(module)
        draws = _random_state(self.x.device) != state
        before = _contents(module)
        for _ in range(REPEATS if draws else 1):
            if not self._as_wanted(module):
                raise self._refused(before, module, draws)
        self._train(module)
        if not self._as_wanted(module):
            raise self._refused(before, module, draws=False)
        changed = [path for path, content in _contents(module).items() if before.get(path) != content]
        self._try_other_values(module, changed)
        module = self._fresh()  # one that keeps something of the first batch it sees
        before = _contents(module)
        self._train(module)
        if not self._as_wanted(module):
            raise self._refused(before, module, draws=False)

    def _try_other_values(self, module: nn.Module, changed: list[StatePath]) -> None:
        """What answers did not depend on now they might depend on later: a counter, above all."""
        for step in (FAR, -FAR):

            def put(paths: list[StatePath], step: int = step) -> nn.Module:
                tried = self._fresh()
                self._answers(tried)  # what it makes only once is made
                for path in paths:
                    with suppress(KeyError, TypeError):  # what holds it was made in training
                        _holder(tried, path)[path[-1]] = _other(_holder(module, path)[path[-1]], step)
                return tried

            if not self._as_wanted(put(changed)):
                named = next((path for path in changed if not self._as_wanted(put([path]))), changed[0])
                raise self._because_of(named)

    # --- running ---------------------------------------------------------------------------------------------

    def _fresh(self) -> nn.Module:
        return copy.deepcopy(self.skeleton)

    def _as_wanted(self, module: nn.Module) -> bool:
        try:
            return _same(self._answers(module), self.wanted)
        except Exception:  # it reads what was taken from it
            return False

    def _answers(self, module: nn.Module) -> Tensor:
        module.eval()
        with torch.no_grad():
            return self._call(module, self.x, self.tensors())

    def _train(self, module: nn.Module) -> None:
        """A step without an optimizer."""
        module.train()
        for name in self.still:
            module.get_submodule(name).eval()
        tensors = self.tensors()
        for name, parameter in module.named_parameters():
            tensors[name].requires_grad_(parameter.requires_grad)
        with torch.enable_grad():
            outputs = self._call(module, self.others, tensors)
            if outputs.requires_grad:
                outputs.sum().backward()  # type: ignore[no-untyped-call]

    def _call(self, module: nn.Module, x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        output = functional_call(module, tensors, (x,))
        outputs: Tensor = getattr(output, "logits", output)
        return outputs

    # --- saying what it is -----------------------------------------------------------------------------------

    def _refused(self, before: dict[StatePath, Any], module: nn.Module, draws: bool) -> InputError:
        if draws:
            return InputError(
                f"{self._where(train=False)} draws random numbers in evaluation mode, so that its answers would never "
                f"be the same: give functional dropout training=self.training"
            )
        for path, content in _contents(module).items():
            if before.get(path) != content:
                tried = self._fresh()
                whole = path[:2]
                _holder(tried, whole)[path[1]] = _holder(module, whole)[path[1]]
                if not self._as_wanted(tried):
                    return self._because_of(path)
        return InputError(
            f"{self._where(train=True)} answers otherwise after a training batch, with the same tensors and "
            f"attributes, so that tasks would disturb each other: keep its state in buffers, not in globals"
        )

    def _because_of(self, path: StatePath) -> InputError:
        name, attribute = path[0], ".".join(path[1:])
        return InputError(
            f"{self._named(name)} changes its attribute '{attribute}' while it runs, and its answers depend on it, so "
            f"that tasks would disturb each other: make it a buffer that changes in training only"
        )

    def _where(self, train: bool) -> str:
        """The innermost submodule that gives other outputs for the same inputs."""
        module = self._fresh()
        first = self._calls(module)
        if train:
            self._train(module)
        for _ in range(REPEATS):  # what is drawn may be the same by chance
            for (name, given, result), (_, given_now, now) in zip(first, self._calls(module), strict=False):
                if given == given_now and result != now:
                    return self._named(name)
        return self._named("")

    def _calls(self, module: nn.Module) -> list[tuple[str, Any, Any]]:
        """What every submodule was given and gave, in the order in which they were done."""
        found: list[tuple[str, Any, Any]] = []

        def note(name: str) -> Callable[..., None]:
            return lambda _, given, result: found.append((name, _content(given, set()), _content(result, set())))

        hooks = [part.register_forward_hook(note(name)) for name, part in module.named_modules()]
        self._answers(module)
        for hook in hooks:
            hook.remove()
        return found

    def _named(self, name: str) -> str:
        kind = type(self.skeleton.get_submodule(name)).__name__
        return f"the submodule '{name}' ({kind})" if name else f"the module ({kind})"


# --- attributes ----------------------------------------------------------------------------------------------------


def _contents(module: nn.Module) -> dict[StatePath, Any]:
    """What the plain attributes of all submodules hold, in a form that can be compared."""
    return {
        (name, *path): _content(value, set())
        for name, part in module.named_modules()
        for path, value in _leaves(part, frozenset())
    }


def _leaves(holder: Any, above: frozenset[int]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values in an object, those in its objects and in its dictionaries by name one by one."""
    for name, value in _inside(holder).items():
        if isinstance(holder, nn.Module) and name in OF_EVERY_MODULE:
            continue
        if _is_holder(value) and id(value) not in above:
            yield from ((((name, *path)), leaf) for path, leaf in _leaves(value, above | {id(value)}))
        else:
            yield (name,), value


def _is_holder(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    known = isinstance(value, (*SIMPLE, Tensor, np.ndarray, nn.Module, type, ModuleType, *COLLECTIONS))
    return hasattr(value, "__dict__") and not known and not inspect.isroutine(value)


def _inside(holder: Any) -> dict[str, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def _content(value: Any, seen: set[int]) -> Any:
    if isinstance(value, SIMPLE):
        return type(value), repr(value)
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    if isinstance(value, Tensor):
        return tuple(value.shape) if value.is_meta else tensor_digest(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return tensor_digest(value.get_state())
    if isinstance(value, Mapping):
        return type(value), [(_content(key, seen), _content(held, seen)) for key, held in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    if isinstance(value, COLLECTIONS):
        return type(value), [_content(held, seen) for held in value]
    if isinstance(value, nn.Module):  # hidden in a list
        return type(value), _content(vars(value), seen)
    return type(value)  # of what nothing is known the answers must tell


def _holder(module: nn.Module, path: StatePath) -> dict[str, Any]:
    name, *inner, _ = path
    holder = vars(module.get_submodule(name))
    for step in inner:
        holder = _inside(holder[step])
    return holder


def _other(value: Any, step: int) -> Any:
    """Something else of the same kind: emptied if it is a collection, None if nothing is known of it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex):
        return value + step
    if isinstance(value, Tensor | np.ndarray):
        return value ^ True if value.dtype in (torch.bool, np.bool_) else value + step
    if isinstance(value, tuple):
        return tuple(_other(held, step) for held in value)
    return type(value)() if type(value) in EMPTIED else None


# --- answers -------------------------------------------------------------------------------------------------------


def _same(one: Tensor, two: Tensor) -> bool:
    """Bit for bit."""
    return one.shape == two.shape and tensor_digest(one) == tensor_digest(two)


def _random_state(device: torch.device) -> Any:
    of_torch = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [tensor_digest(state) for state in of_torch], random.getstate(), repr(np.random.get_state())  # noqa: NPY002


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Leave all random states as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), flags:
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
