"""Optimizer steps: one after the other, or captured once as a CUDA graph and replayed.

A step is the whole of it: gather and augment the batch, forward, backward, the method's own change of gradients, the
optimizer, the counters. Captured, the host's part of an epoch is a permutation, a learning rate and one launch a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet.data.tasks import Data
from exssnet.engine.cuda import second_stream as side
from exssnet.engine.cuda.gpu_lock import lending_the_turn
from exssnet.engine.kernels import rehearse
from exssnet.engine.loss import count
from exssnet.methods.base import Batch, Method, Phase

WARM_UPS = 2
STRETCH = 32  # captured steps that are launched before the host waits for those before
_rehearsed: set[tuple[type[Method], str, int, torch.device]] = set()  # by method, phase, batch size and device


class Steps:
    """The steps of one phase on one task's data, each called from Python."""

    def __init__(self, method: Method, data: Data, phase: Phase, optimizer: Optimizer, batch_size: int) -> None:
        self.method, self.data, self.phase, self.optimizer = method, data, phase, optimizer
        self.sizes = _sizes(len(data), batch_size)
        self.total = torch.zeros(2, device=data.device)  # summed loss, correct answers
        self.generator = torch.Generator(device=data.device)  # of the augmentation

    def epoch(self, order: Tensor, lr: float, seed: int, progress: Callable[[float], None]) -> tuple[float, float]:
        """One pass over the data in this order; mean loss, and accuracy in percent over the batches as they came."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self.generator.manual_seed(seed)
        self.total.zero_()
        self._run(order, progress)
        mean, correct = (self.total / sum(self.sizes)).tolist()
        return mean, 100 * correct

    def _run(self, order: Tensor, progress: Callable[[float], None]) -> None:
        done = 0
        for number, size in enumerate(self.sizes, start=1):
            self._step(order[done : done + size])
            done += size
            progress(number / len(self.sizes))

    def _step(self, index: Tensor) -> None:
        batch = Batch(*self.data.batch(index, self.generator), self.data, index, self.generator)
        loss = self.method.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.method.after_backward()
        self.optimizer.step()
        assert batch.logits is not None
        count(self.total, loss, batch.logits, batch.y)


class GraphSteps(Steps):
    """The same steps, captured: one graph per batch size, replayed until the epoch is through."""

    def __init__(self, method: Method, data: Data, phase: Phase, optimizer: Optimizer, batch_size: int) -> None:
        super().__init__(method, data, phase, optimizer, batch_size)
        self._order = torch.zeros(len(data), dtype=torch.int64, device=data.device)
        self._at = torch.zeros((), dtype=torch.int64, device=data.device)
        self._offsets = torch.arange(batch_size, device=data.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _run(self, order: Tensor, progress: Callable[[float], None]) -> None:
        self._order.copy_(order)
        seed = self.generator.initial_seed()
        missing = sorted(set(self.sizes) - set(self._graphs), reverse=True)
        self._rehearse(missing)
        for size in missing:
            self._graphs[size] = self._captured(size)
        self.generator.manual_seed(seed)  # capturing drew from it
        self._at.zero_()
        self.total.zero_()
        with lending_the_turn():
            self._replay(progress)

    def _replay(self, progress: Callable[[float], None]) -> None:
        """All steps of the epoch, at most two stretches ahead of the GPU.

        Progress is then that of the GPU, and what another run launches does not stand in line behind an epoch.
        """
        ahead: deque[tuple[int, torch.cuda.Event]] = deque()

        def wait() -> None:
            done, end = ahead.popleft()
            end.synchronize()
            progress(done / len(self.sizes))

        for begin in range(0, len(self.sizes), STRETCH):
            stretch = self.sizes[begin : begin + STRETCH]
            for size in stretch:
                self._graphs[size].replay()
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no core is busy with waiting
            end.record()
            ahead.append((begin + len(stretch), end))
            if len(ahead) == 2:
                wait()
        wait()

    def _rehearse(self, sizes: list[int]) -> None:
        """Have the kernels of all steps compiled, beside what the compiler does when the first of them is captured."""
        kinds = {size: (type(self.method), self.phase.name, size, self.data.device) for size in sizes}
        if _rehearsed.issuperset(kinds.values()):
            return
        before = self._moving()
        try:
            with side.line(self.data.device) as line, side.along(line):
                for size in kinds:
                    self._at.zero_()
                    rehearse(self.data.device, partial(self._next, size))
        finally:
            self._put_back(before)
        _rehearsed.update(kinds.values())

    def _captured(self, size: int) -> torch.cuda.CUDAGraph:
        """Run a few steps to let every library set itself up, take them back, and capture one."""
        before = self._moving()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        device = self.data.device
        with side.line(device) as line, torch.random.fork_rng(devices=[device]):  # dropout must not notice
            with side.along(line):
                for _ in range(WARM_UPS):
                    self._at.zero_()
                    self._next(size)
            self._at.zero_()
            self.optimizer.zero_grad(set_to_none=True)
            with side.capture(graph, line):
                self._next(size)
        self._put_back(before)
        return graph

    def _next(self, size: int) -> None:
        side.begin()
        self._step(self._order[self._at + self._offsets[:size]])
        self._at += size

    def _moving(self) -> list[tuple[Tensor, Tensor]]:
        """Everything a step changes, with a copy; the optimizer's state by parameter."""
        tensors = [*self.phase.parameters, *self.method.buffers().values()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        return [(tensor, tensor.detach().clone()) for tensor in tensors]

    def _put_back(self, before: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            known = {id(tensor) for tensor, _ in before}
            for tensor, copy in before:
                tensor.copy_(copy)
            for state in self.optimizer.state.values():  # made by the first step: zeros, in the named optimizers
                for value in state.values():
                    if id(value) not in known:
                        value.zero_()


def _sizes(examples: int, batch_size: int) -> list[int]:
    """Sizes of an epoch's batches; a last batch of one is left out, since batch statistics need two."""
    full, rest = divmod(examples, batch_size)
    return [batch_size] * full + ([rest] if rest > 1 or not full else [])


def capturable(method: Method, data: Data, named_optimizer: bool) -> bool:
    """Whether a step can be captured: data in a GPU's memory, nothing that looks at values, an optimizer we know."""
    return data.device.type == "cuda" and data.capturable and method.capturable and named_optimizer
