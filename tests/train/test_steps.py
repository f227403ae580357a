"""Captured steps without a GPU: the order of launches, waits and progress."""

import gc
from contextlib import nullcontext

import pytest
import torch
from tests.core.networks import mlp, task

from exssnet.engine.cuda import second_stream as side
from exssnet.methods import parse
from exssnet.methods.base import Phase
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.train import steps as steps_module
from exssnet.train.optimizers import optimizer_factory
from exssnet.train.steps import STRETCH, GraphSteps


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


@pytest.mark.parametrize("count", [1, STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH, 5 * STRETCH + 3])
def test_steps_are_launched_a_little_ahead_of_the_gpu_and_progress_is_the_gpus(count, monkeypatch):
    gpu, heard = Gpu(), []
    monkeypatch.setattr(steps_module.torch.cuda, "Event", gpu.event)
    method = parse("supsup")[0](mlp(), MaskSettings(density=0.2), 0)
    data = task(0).train
    parameter = torch.zeros(1, requires_grad=True)
    phase = Phase("mask", [parameter], 1, 0.1)
    steps = GraphSteps(method, data, phase, optimizer_factory("adam")([parameter], 0.1), 1)
    steps.sizes = [1] * count
    steps._graphs = {1: gpu}
    steps._run(torch.arange(len(data)), lambda share: heard.append((share, gpu.made)))
    assert gpu.launched == gpu.made == count
    assert gpu.most_ahead <= 2 * STRETCH
    assert heard == [(made / count, made) for _, made in heard]  # of what was made, and no more
    assert [made for _, made in heard] == [*range(STRETCH, count, STRETCH), count]


@pytest.mark.parametrize("collecting", [True, False])
def test_while_a_step_is_captured_the_garbage_collector_waits(collecting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    seen = []

    def fails():
        with side.capture(None, None):
            seen.append(gc.isenabled())
            raise ValueError("in a step")

    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(ValueError, match="in a step"):
            fails()
        assert [*seen, gc.isenabled()] == [False, collecting]
    finally:
        gc.enable()
