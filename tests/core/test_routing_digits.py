"""Routing of digits that nobody has labelled with a task."""

from functools import cache, partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from exssnet import Model
from exssnet.core.network import MaskedNetwork
from exssnet.core.routing import rules as routing
from exssnet.core.routing.rules import RULES
from exssnet.models import build

route = partial(routing.route, statistics="tasks")  # those of the batch: test_routing_statistics.py

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
UNEQUAL = ((0, 1), (2, 3, 4), (5, 6, 7, 8, 9))


def normed(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16, affine=False), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, bias=False), nn.BatchNorm2d(32, affine=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, classes, bias=False),
    )  # fmt: skip


def lenet(classes: int) -> nn.Module:
    return build("lenet-300-100", (1, 8, 8), classes)


@cache
def digits(groups) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, labels within their task, tasks, and which are kept for the test: every fourth."""
    found = load_digits()
    x = torch.tensor(found.images[:, None] / 16, dtype=torch.float32)
    place = {digit: (task, label) for task, group in enumerate(groups) for label, digit in enumerate(group)}
    both = torch.tensor([place[int(digit)] for digit in found.target])
    return x, both[:, 1], both[:, 0], torch.arange(len(x)) % 4 == 0


def learned(groups, module, seed=0, **options) -> MaskedNetwork:
    x, y, task, test = digits(groups)
    model = Model(module, seed=seed, method="exssnet", **options)
    for number in range(len(groups)):
        train = (task == number) & ~test
        model.learn(str(number), (x[train], y[train]), epochs=(8, 8))
    return model._method.network


def found_tasks(groups, network, rule) -> tuple[float, float]:
    """Percent of the test images that find their task, by image and by batches of 16; every task counts the same."""
    x, _, task, test = digits(groups)
    right = []
    for number in range(len(groups)):
        own = x[test & (task == number)]
        batches = torch.stack([route(network, batch, rule, per="batch").choice[0] for batch in own.split(16)])
        right.append([(found == number).double().mean() for found in (route(network, own, rule).choice, batches)])
    return tuple((100 * torch.tensor(right).mean(0)).tolist())


# Measured percent by image and by batch, for each rule in the order of RULES; chance is 20, and 33 where unequal.
# Seeds differ: from 0 to 4, pairs by image, confident finds 54 to 65, one-shot 27 to 61, binary 31 to 65.
# So do machines: hence a sixth of what was measured is enough for the latter two.
DIGITS = {
    "pairs-shared": (PAIRS, lenet, {}, ((60, 80), (58, 63), (57, 70))),
    "pairs-task": (PAIRS, lenet, {"head": "task"}, ((58, 80), (59, 67), (58, 73))),
    "unequal-shared": (UNEQUAL, lenet, {}, ((69, 91), (59, 77), (69, 87))),
    "unequal-task": (UNEQUAL, lenet, {"head": "task"}, ((71, 98), (75, 83), (78, 100))),
    "norms-shared": (PAIRS, normed, {"density": 0.3}, ((75, 93), (41, 57), (58, 70))),
    "norms-task": (PAIRS, normed, {"density": 0.3, "head": "task"}, ((73, 87), (41, 43), (52, 70))),
}


@pytest.mark.parametrize("kind", DIGITS)
def test_digits_find_their_task_well_above_chance(kind):
    groups, module, options, measured = DIGITS[kind]
    network = learned(groups, module(max(map(len, groups))), **options)
    chance = 100 / len(groups)
    for rule, expected, share in zip(RULES, measured, (1 / 2, 1 / 6, 1 / 6), strict=True):
        for found, before in zip(found_tasks(groups, network, rule), expected, strict=True):
            assert found > chance + share * (before - chance), (rule, found)
    assert network.verify().verified
