"""A skeleton that runs on tensors passed in, held to the module that it is a copy of and to `functional_call`."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call

from exssnet.core.module.skeleton import Runner


class Tied(nn.Module):
    """One weight in two layers, one buffer in two places, a parameter of its own, and a layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.arange(4.0))
        self.inner = nn.Module()
        self.inner.register_buffer("again", self.shift)
        self.fails = False

    def forward(self, x):
        out = self.second(self.first(x) * self.scale + self.shift) - self.inner.again
        if self.fails:
            raise ValueError("as asked")
        return out


def tensors_of(module):
    return {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}


def all_of(module):
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def test_tensors_that_are_passed_in_are_the_ones_that_run_also_where_a_module_has_one_twice():
    torch.manual_seed(0)
    module, x = Tied(), torch.randn(3, 4)
    runner = Runner(module, ())
    tensors = {name: tensor * 3 for name, tensor in tensors_of(module).items()}
    assert torch.equal(runner.run(tensors, x, training=False, fixed={}), functional_call(module, tensors, (x,)))
    other = tensors_of(module)
    assert torch.equal(runner.run(other, x, training=False, fixed={}), module(x))


@pytest.mark.parametrize("fails", [False, True])
def test_the_skeleton_holds_no_numbers_after_a_call_whether_it_ends_well_or_not(fails):
    module, x = Tied(), torch.randn(3, 4)
    module.fails = fails
    runner = Runner(module, ())
    before = {name: id(tensor) for name, tensor in all_of(runner._form.skeleton)}
    with pytest.raises(ValueError, match="as asked") if fails else nullcontext():
        runner.run(tensors_of(module), x, training=False, fixed={})
    assert {name: id(tensor) for name, tensor in all_of(runner._form.skeleton)} == before
    assert all(tensor.is_meta for _, tensor in all_of(runner._form.skeleton))


def test_gradients_reach_the_tensors_that_are_passed_in():
    torch.manual_seed(0)
    module, x = Tied(), torch.randn(3, 4)
    module(x).square().sum().backward()
    tensors = {name: tensor.requires_grad_(name != "shift") for name, tensor in tensors_of(module).items()}
    Runner(module, ()).run(tensors, x, training=True, fixed={}).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(tensors[name].grad, parameter.grad)


class Guarded(nn.Module):
    """A module that catches what its layers raise and tries again, and calls its last layer by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        try:
            return self.last(input=self.first(x).relu())
        except Exception:
            return self.last(self.first(x))


def test_what_a_layer_sees_is_computed_and_nothing_after_it(monkeypatch):
    torch.manual_seed(0)
    module, x, ran = Guarded(), torch.randn(5, 4), []
    runner, tensors = Runner(module, ()), tensors_of(module)
    plain = nn.Linear.forward
    monkeypatch.setattr(
        nn.Linear, "forward", lambda layer, input: ran.append(layer.out_features) or plain(layer, input)
    )
    monkeypatch.setattr("exssnet.core.module.skeleton.is_rehearsing", lambda: pytest.fail("Triton would be imported"))
    assert torch.equal(runner.inputs_of("last", tensors, x), module.first(x).relu())
    assert ran == [3, 3]  # the runner's and the module's first layer, no last one
    assert all(tensor.is_meta for _, tensor in all_of(runner._form.skeleton))
    assert torch.equal(runner.run(tensors, x, training=False, fixed={}), module(x))  # as before: whole


def test_of_a_layer_that_is_called_twice_the_first_call_is_seen():
    tied, x = Tied(), torch.randn(3, 4)
    tied.second = tied.first
    assert torch.equal(Runner(tied, ()).inputs_of("first", tensors_of(tied), x), x)
