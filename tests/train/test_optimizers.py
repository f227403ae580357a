"""Named optimizers and schedules are torch's, with the decay that was asked for."""

import pytest
import torch

from exssnet.errors import InputError
from exssnet.train import TrainSettings
from exssnet.train.optimizers import SCHEDULES, optimizer_factory, schedule_of

CASES = {
    "adam": ("adam", None, lambda p: torch.optim.Adam(p, 0.01)),
    "adam with decay in the gradient": ("adam", 0.1, lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1)),
    "adamw with its usual decay": ("adamw", None, lambda p: torch.optim.AdamW(p, 0.01)),
    "adamw": ("adamw", 0.1, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "adamw without decay": ("adamw", 0, lambda p: torch.optim.Adam(p, 0.01)),
    "sgd": ("sgd", None, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    "sgd with decay": ("sgd", 0.1, lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_named_optimizer_steps_as_torchs(case):
    name, decay, plain = CASES[case]
    draw = torch.Generator().manual_seed(0)
    one = [torch.randn(size, generator=draw).requires_grad_() for size in (20, 3)]
    two = [parameter.detach().clone().requires_grad_() for parameter in one]
    ours, theirs = optimizer_factory(name, decay)(one, 0.01), plain(two)
    for _ in range(20):
        for p, q in zip(one, two, strict=True):
            p.grad = torch.randn(len(p), generator=draw)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("decay", [-0.1, float("nan"), float("inf"), "much"])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(InputError, match="weight_decay is"):
        optimizer_factory("adamw", decay)


def test_an_optimizer_of_the_users_own_takes_no_decay():
    with pytest.raises(InputError, match="one of your own brings its decay along"):
        optimizer_factory(lambda parameters, lr: torch.optim.Adam(parameters, lr), 0.1)


def plateau(optimizer):
    """What the published code had next to the cosine."""
    waits = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min")
    accuracies = iter(range(1, 1000))
    return lambda: waits.step(next(accuracies))


TORCHS = {
    "cosine": lambda o, epochs: [torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs).step],
    "linear": lambda o, epochs: [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, epochs).step],
    "constant": lambda o, epochs: [],
    "published": lambda o, epochs: [torch.optim.lr_scheduler.CosineAnnealingLR(o, epochs).step, plateau(o)],
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("epochs", [1, 12, 50, 100])
def test_a_named_schedule_has_the_rates_of_torchs(name, epochs):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    steps = TORCHS[name](optimizer, epochs)
    for epoch in range(epochs):
        wanted = optimizer.param_groups[0]["lr"]
        # the plateau makes no cut of less than 1e-8
        assert schedule_of(name)(0.1, epoch, epochs) == pytest.approx(wanted, rel=1e-6, abs=1e-8)
        optimizer.step()
        for step in steps:
            step()


def test_a_schedule_that_is_none_is_refused():
    with pytest.raises(
        InputError, match="unknown schedule 'zigzag': choose one of constant, cosine, linear, published"
    ):
        TrainSettings(schedule="zigzag")
