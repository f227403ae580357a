"""Named optimizers are torch's, with the decay that was asked for."""

import pytest
import torch

from exssnet.errors import InputError
from exssnet.train.optimizers import optimizer_factory

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
