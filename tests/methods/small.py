"""Methods on a small network, and the tasks that several test files let them learn."""

import torch
from torch import nn

from exssnet.data import TensorData
from exssnet.data.tasks import Outline, Task
from exssnet.data.tensors import Shared
from exssnet.methods import methods
from exssnet.methods.base import Batch


def examples(count=40, classes=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = torch.randn(count, 6, generator=draw) + 2 * nn.functional.one_hot(y + seed % 3, 6)
    return TensorData(Shared(x), torch.arange(count), y, classes)


def task(index=0, classes=3, count=40):
    data = examples(count, classes, seed=index)
    return Task(index, f"task{index + 1}", tuple(range(classes)), data, data)


def made(name, classes=(3, 3, 3), head="task", module=None, **changes):
    """A method on a small network, with all its settings as usual but these."""
    kind = methods()[name]
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, kind.module_outputs(head, classes)))
    outline = Outline(tuple(classes), 40 * len(classes))
    return kind(module, kind.settings_type(**({"epochs": 2, "lr": 0.01} | changes)), 0, head, outline)


def batch_of(data, index=None, seed=0):
    index = torch.arange(len(data)) if index is None else index
    x, y = data.batch(index)
    return Batch(x, y, data, index, torch.Generator().manual_seed(seed))


def normed(outputs):
    """With statistics that a task moves."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def by_hand(method, weights, statistics, x):
    """The outputs of `normed` under a vector of weights; without statistics, with those of the batch."""
    w = {name: tensor.detach() for name, tensor in method.network.layout.tensors(weights).items()}
    hidden = x @ w["0.weight"].T + w["0.bias"]
    mean, var = (hidden.mean(0), hidden.var(0, unbiased=False)) if statistics is None else statistics
    hidden = (hidden - mean) / (var + 1e-5).sqrt() * w["1.weight"] + w["1.bias"]
    return hidden.clamp(min=0) @ w["3.weight"].T + w["3.bias"]


def statistics_of(method):
    return tuple(method.network.statistics[f"1.running_{name}"].clone() for name in ("mean", "var"))
