"""Small gated methods, and the tasks that several test files let them learn."""

import pytest
import torch
from torch import nn

from exssnet.data import TensorData
from exssnet.data.tasks import Outline, Task
from exssnet.data.tensors import Shared
from exssnet.experiments.config import resolve
from exssnet.experiments.prepare import prepare
from exssnet.methods import methods
from exssnet.methods.base import Batch

CLASSES = (3, 3, 3)

both = pytest.mark.parametrize("name", ["hat", "cgate"])


def examples(count=40, shape=(6,), seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, *shape, generator=draw) + y.view(-1, *[1] * len(shape))
    return TensorData(Shared(x), torch.arange(count), y, 3)


def task(index=0, **options):
    data = examples(seed=index, **options)
    return Task(index, f"task{index + 1}", (0, 1, 2), data, data)


def toy(outputs=9):
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))


def made(name, module=None, head="task", **changes):
    kind = methods()[name]
    torch.manual_seed(0)
    module = module or toy(kind.module_outputs(head, CLASSES))
    settings = kind.settings_type(**({"epochs": 2, "lr": 0.01} | changes))
    return kind(module, settings, 0, head, Outline(CLASSES))


def batch_of(data, size=None):
    index = torch.arange(size or len(data))
    return Batch(*data.batch(index), data, index, torch.Generator().manual_seed(0))


def begun(name, used=None, **options):
    """In the middle of a second task, the units used so far by the first."""
    method = made(name, **options)
    method.tasks.append("earlier")
    if used is not None:
        method.used.copy_(used)
    next(method.phases(task(1)))
    return method


def digits(name, seed=0, engine=None, **changes):
    changes = {"tasks": 3, "epochs": 10, "device": "cpu"} | changes
    return prepare(resolve("split-digits", name, seed, **changes), engine)
