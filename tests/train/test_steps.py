"""Captured steps without a GPU: the order of launches, waits and progress."""

import gc
from contextlib import nullcontext

import pytest
import torch

from exssnet.engine.cuda import streams
from exssnet.engine.cuda.capture import AHEAD, CapturedLoop


class Gpu:
    """Does what was launched only when somebody waits for it."""

    def __init__(self):
        self.launched = self.made = self.most_ahead = 0

    def replay(self):
        self.launched += 1
        self.most_ahead = max(self.most_ahead, self.launched - self.made)

    def event(self, blocking):
        assert blocking
        return Mark(self)


class Mark:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.launched

    def synchronize(self):
        self.gpu.made = max(self.gpu.made, self.at)


class Captured:
    """A step of one example whose graph is there already."""

    def __init__(self, count):
        self.sizes, self.name, self.examples, self.capturable = [1] * count, "step", count, True
        self.generator, self.total = torch.Generator(), torch.zeros(2)

    def moving(self):
        return [self.total]

    def optimizer_state(self):
        return []


@pytest.mark.parametrize("count", [1, AHEAD - 1, AHEAD, AHEAD + 1, 2 * AHEAD, 5 * AHEAD + 3])
def test_steps_are_launched_a_little_ahead_of_the_gpu_and_progress_is_the_gpus(count, monkeypatch):
    gpu, heard = Gpu(), []
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    loop = CapturedLoop(Captured(count), torch.device("cpu"), count, set())
    loop._graphs = {1: gpu}
    loop.epoch(torch.arange(count), lambda share: heard.append((share, gpu.made)))
    assert gpu.launched == gpu.made == count
    assert gpu.most_ahead <= 2 * AHEAD
    assert heard == [(made / count, made) for _, made in heard]  # of what was made, and no more
    assert [made for _, made in heard] == [*range(AHEAD, count, AHEAD), count]


@pytest.mark.parametrize("collecting", [True, False])
def test_while_a_step_is_captured_the_garbage_collector_waits(collecting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    seen = []

    def fails():
        with streams.capture(None, None):
            seen.append(gc.isenabled())
            raise ValueError("in a step")

    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(ValueError, match="in a step"):
            fails()
        assert [*seen, gc.isenabled()] == [False, collecting]
    finally:
        gc.enable()
