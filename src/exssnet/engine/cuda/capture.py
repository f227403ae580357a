"""Steps captured once as CUDA graphs and replayed: for the host an epoch is a permutation and a launch a step."""

from __future__ import annotations

import warnings
from collections import deque
from functools import partial

import torch
from torch import Tensor

from exssnet.core.engine import Loop, Progress, Step
from exssnet.engine.cuda import streams
from exssnet.engine.cuda.runner import precompile
from exssnet.engine.cuda.sharing import releasing_gpu

WARM_UPS = 2
AHEAD = 32  # captured steps that are launched before the host waits for those before


class CapturedLoop(Loop):
    """A graph for each batch size. A step that cannot be captured runs eagerly, which is said once."""

    def __init__(self, step: Step, device: torch.device, examples: int, precompiled: set[tuple[str, int]]) -> None:
        super().__init__(step)
        self._device, self._precompiled = device, precompiled
        self._order = torch.zeros(examples, dtype=torch.int64, device=device)
        self._at = torch.zeros((), dtype=torch.int64, device=device)
        self._offsets = torch.arange(max(step.sizes), device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._capturable = True

    def epoch(self, order: Tensor, progress: Progress) -> None:
        if self._capturable:
            self._order.copy_(order)
            self._capturable = self._capture_all()
        if not self._capturable:
            super().epoch(order, progress)
            return
        self._at.zero_()
        with releasing_gpu():
            self._replay(progress)

    def _capture_all(self) -> bool:
        """Capture what is not captured yet; whether that was possible."""
        missing = sorted(set(self.step.sizes) - set(self._graphs), reverse=True)
        if not missing:
            return True
        seed, before = self.step.generator.initial_seed(), Snapshot(self.step)
        try:
            self._precompile(missing, before)
            for size in missing:
                self._graphs[size] = self._captured(size, before)
            return True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a failed capture raises too
            reason = str(cause).strip().partition("\n")[0]
            warnings.warn(f"the step of {self.step.name} cannot be captured ({reason}): it runs eagerly", stacklevel=2)
            self.step.capturable = False  # nor are those of later phases tried
            self.step.generator = torch.Generator(self._device)  # the old one may be in the state of a capture
            return False
        finally:
            before.restore()
            self.step.generator.manual_seed(seed)  # capturing drew from it

    def _replay(self, progress: Progress) -> None:
        """All steps of the epoch, at most two stretches ahead of the GPU.

        Progress is then that of the GPU, and what another run launches does not wait for an epoch.
        """
        sizes = self.step.sizes
        ahead: deque[tuple[int, torch.cuda.Event]] = deque()

        def wait() -> None:
            done, end = ahead.popleft()
            end.synchronize()
            progress(done / len(sizes))

        for begin in range(0, len(sizes), AHEAD):
            stretch = sizes[begin : begin + AHEAD]
            for size in stretch:
                self._graphs[size].replay()
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no core is busy with waiting
            end.record()
            ahead.append((begin + len(stretch), end))
            if len(ahead) == 2:
                wait()
        wait()

    def _precompile(self, sizes: list[int], before: Snapshot) -> None:
        """Have the kernels of all steps compiled, while the compiler works on the first of them."""
        kinds = {size: (self.step.name, size) for size in sizes}
        if self._precompiled.issuperset(kinds.values()):
            return
        try:
            with streams.main_stream(self._device) as main, streams.on_stream(main):
                for size in kinds:
                    self._at.zero_()
                    precompile(self._device, partial(self._next, size))
        finally:
            before.restore()
        self._precompiled.update(kinds.values())

    def _captured(self, size: int, before: Snapshot) -> torch.cuda.CUDAGraph:
        """Run a few steps so that every library sets itself up, take them back, and capture one."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.step.generator)
        device = self._device
        with streams.main_stream(device) as main, torch.random.fork_rng(devices=[device]):  # dropout must not notice
            with streams.on_stream(main):
                for _ in range(WARM_UPS):
                    self._at.zero_()
                    self._next(size)
            self._at.zero_()
            self.step.forget_gradients()
            with streams.capture(graph, main):
                self._next(size)
        before.restore()
        return graph

    def _next(self, size: int) -> None:
        streams.begin()
        self.step(self._order[self._at + self._offsets[:size]])
        self._at += size


class Snapshot:
    """Everything that a step changes, to be put back."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._before = [(tensor, tensor.detach().clone()) for tensor in (*step.moving(), *step.optimizer_state())]

    def restore(self) -> None:
        """As if no step had been taken since."""
        with torch.no_grad():
            known = {id(tensor) for tensor, _ in self._before}
            for tensor, copy in self._before:
                tensor.copy_(copy)
            for tensor in self._step.optimizer_state():  # made by the first step: zeros, in the named optimizers
                if id(tensor) not in known:
                    tensor.zero_()
