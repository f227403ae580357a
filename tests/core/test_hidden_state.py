"""A module whose answers depend on more than its tensors and its input is refused before it learns."""

import random

import numpy as np
import pytest
import torch
from tests.core import stateful
from tests.core.networks import Transformer, examples, mlp, tokens
from tests.core.stateful import AT_RANDOM, BY_ATTRIBUTE, ELSEWHERE, HARMLESS, between

import exssnet
from exssnet import InputError, Model
from exssnet.data.files.examples import as_data
from exssnet.methods import parse
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.models import build
from exssnet.train import Trainer

X, Y = examples(0)


@pytest.fixture(autouse=True)
def _as_at_first(monkeypatch):
    monkeypatch.setattr(stateful, "seen_by_all", [])
    monkeypatch.setattr(stateful.OfTheClass, "steps", 0)
    random.seed(0)


def learn(module, data=(X, Y)):
    model = Model(module, density=0.5)
    model.learn("a", data, epochs=(1, 1))
    return model


@pytest.mark.parametrize("part", BY_ATTRIBUTE)
def test_a_module_that_answers_by_an_attribute_that_changes_is_refused_by_its_name(part):
    torch.manual_seed(0)
    kind = part.__name__
    wanted = rf"^the submodule 'part' \({kind}\) changes its attribute '{BY_ATTRIBUTE[part]}.*make it a buffer"
    with pytest.raises(InputError, match=wanted):
        learn(between(part()))


@pytest.mark.parametrize("part", AT_RANDOM)
def test_a_module_that_draws_in_evaluation_is_refused_by_the_name_of_what_draws(part):
    wanted = rf"^the submodule 'part' \({part.__name__}\) draws random numbers .* training=self\.training$"
    with pytest.raises(InputError, match=wanted):
        learn(between(part()))


def test_a_module_with_a_generator_of_its_own_is_refused():
    with pytest.raises(InputError, match=r"^the submodule 'part' \(OwnGenerator\)"):
        learn(between(stateful.OwnGenerator()))


@pytest.mark.parametrize("part", ELSEWHERE)
def test_state_outside_of_the_module_is_refused_by_the_name_of_what_answers_otherwise(part):
    with pytest.raises(InputError, match=rf"^the submodule 'part' \({part.__name__}\) answers otherwise"):
        learn(between(part()))


@pytest.mark.parametrize("part", HARMLESS)
def test_what_cannot_change_an_answer_is_no_reason_to_refuse(part):
    torch.manual_seed(0)
    model = learn(between(part()))
    before = model.logits(X, "a")
    model.learn("b", examples(1), epochs=(2, 1))
    assert torch.equal(model.logits(X, "a"), before)


def images(size):
    y = torch.arange(32) % 2
    return torch.randn(32, 3, size, size) + y.view(-1, 1, 1, 1), y


@pytest.mark.parametrize(
    ("module", "data"),
    [
        (mlp, (X, Y)),
        (Transformer, tokens()),
        (lambda: build("lenet-300-100", (12,), 2, 0.2), (X, Y)),
        (lambda: build("resnet18", (3, 16, 16), 2, 4), images(16)),
        (lambda: build("resnet50", (3, 32, 32), 2, 4), images(32)),
    ],
)
@pytest.mark.parametrize("examples_there", [1, 2, 3, 32])
def test_usual_networks_are_never_refused_however_few_examples_there_are(module, data, examples_there):
    torch.manual_seed(0)
    model = Model(module(), density=0.5)
    few = as_data((data[0][:examples_there], data[1][:examples_there]), 2)
    model._method.examine(few)


def test_looking_leaves_the_network_and_all_random_states_as_they_were():
    torch.manual_seed(0)
    model = Model(between(stateful.NoisyInTraining()), density=0.5, private=("bias",))
    network = model.network
    before = {name: t.clone() for name, t in {"w": network.weights, **network.buffers, **network.private_start}.items()}
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    model._method.examine(as_data((X, Y)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == states[2]  # noqa: NPY002
    after = {"w": network.weights, **network.buffers, **network.private_start}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(tensor.grad is None for tensor in after.values())


def test_looking_leaves_the_tensors_of_a_module_that_writes_to_what_it_is_given():
    model = Model(between(stateful.Writing()), density=0.5)
    weights, frozen = model.network.weights.clone(), model.network.frozen["part.frozen"].clone()
    model._method.examine(as_data((X, Y)))
    assert torch.equal(model.network.weights, weights)
    assert torch.equal(model.network.frozen["part.frozen"], frozen)


def test_a_part_that_the_user_froze_never_trains_and_so_never_changes():
    part = torch.nn.Sequential(torch.nn.Linear(20, 20), stateful.Mean()).requires_grad_(False)
    assert learn(between(part)).tasks


@pytest.mark.parametrize("name", ["exssnet", "ssnet", "packnet", "piggyback", "wsn"])
def test_every_method_with_masks_refuses_it_before_it_learns(name):
    kind = parse(name)[0]
    method = kind(between(stateful.Mean()), kind.settings_type(), 0)
    x, y = examples(0)
    data = as_data((x, y))
    with pytest.raises(InputError, match="changes its attribute 'mean'"):
        Trainer(method, 0).learn(exssnet.data.Task(0, "a", (0, 1), data, data))
    assert not method.network.tasks


def test_a_model_directory_refuses_it_and_holds_no_task(tmp_path):
    model = Model.create(tmp_path / "model", between(stateful.Mean()), (12,), density=0.5)
    with pytest.raises(InputError, match="changes its attribute 'mean'"):
        model.learn("a", (X, Y), epochs=(1, 1))
    assert Model.open(tmp_path / "model", between(stateful.Mean())).tasks == ()


def test_a_network_is_looked_at_once():
    calls = []

    class Heard(stateful.Counting):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    settings = MaskSettings(density=0.5, mask_epochs=1, weight_epochs=0)
    method = parse("supsup")[0](between(Heard()), settings, 0)
    data = as_data((X, Y))
    method.examine(data)
    assert calls
    calls.clear()
    method.examine(data)
    assert not calls
