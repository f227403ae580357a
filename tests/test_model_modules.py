"""Any module learns, its baked module equals it, and what tasks could not share is refused."""

import copy

import numpy as np
import pytest
import torch
from tests.core.networks import Transformer, examples, mlp, tokens
from torch import nn

from exssnet import InputError, Model
from exssnet.core.partition import stands_for
from exssnet.models import build


def images(channels, size, rows=40):
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % 2
    return torch.randn(rows, channels, size, size, generator=draw) + y[:, None, None, None], y


def volumes(rows=24):
    y = torch.arange(rows) % 2
    return torch.randn(rows, 1, 6, 6, 6, generator=torch.Generator().manual_seed(0)) + y[:, None, None, None, None], y


def signals(rows=24):
    x, y = images(3, 8, rows)
    return x.flatten(2), y


def up_and_down():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3, 2), nn.Flatten(), nn.LazyLinear(2)
    )


def ran_once(module, x):
    module(x[:2])
    return module


MODULES = {
    "mlp": lambda: (mlp(), examples(0)),
    "resnet": lambda: (build("resnet18", (3, 16, 16), 2, width=4), images(3, 16)),
    "transformer": lambda: (Transformer(), tokens()),
    "1-D": lambda: (nn.Sequential(nn.Conv1d(3, 8, 5), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(480, 2)), signals()),
    "3-D": lambda: (nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(256, 2)), volumes()),
    "transposed": lambda: (ran_once(up_and_down(), images(3, 9)[0]), images(3, 9)),
    "fully convolutional": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        images(3, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    "options", [{}, {"head": "task", "private": ("norm", "bias"), "init": "keep"}], ids=["shared", "private"]
)
def test_any_module_learns_and_its_baked_module_equals_it(kind, options):
    torch.manual_seed(0)
    module, (x, y) = MODULES[kind]()
    before = copy.deepcopy(module.state_dict())
    training = [m.training for m in module.modules()]
    if "private" in options:
        options = options | {"private": [word for word in options["private"] if stands_for(module, word)]}
    model = Model(module, density=0.3, seed=1, **options)
    model.learn("plain", (x, y), epochs=(20, 10), batch_size=16)
    model.learn("swapped", (x, 1 - y), epochs=(20, 10), batch_size=16)
    assert model.evaluate((x, y), "plain") > 90
    assert model.evaluate((x, 1 - y), "swapped") > 90

    for task in ("plain", "swapped"):
        baked = model.bake(task)
        assert type(baked) is type(module)
        with torch.no_grad():
            found, wanted = baked(x), model.logits(x, task)
        if any(isinstance(part, nn.Conv2d) for part in module.modules()):  # the model runs these in another format
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert torch.equal(found.argmax(1), wanted.argmax(1))
        else:
            assert torch.equal(found, wanted)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert [m.training for m in module.modules()] == training
    assert not [p for p in module.parameters() if p.grad is not None]


def test_a_buffer_that_learning_changes_is_each_tasks_own():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 2)
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            if self.training:
                self.seen += len(x)
            return self.layer(x) * self.scale + self.seen

    model = Model(Counts(), density=0.5)
    model.learn("a", examples(0), epochs=(1, 0))
    model.learn("b", examples(1), epochs=(2, 0))
    assert [float(task.private["seen"]) for task in model.tasks] == [96, 192]
    assert all("scale" not in task.private for task in model.tasks)


class Centred(nn.Module):
    """Keeps a running centre as a parameter that it changes itself: no task could stay as it is."""

    def __init__(self, buffer: bool, always: bool) -> None:
        super().__init__()
        self.layer, self.always = nn.Linear(12, 2), always
        if buffer:
            self.register_buffer("centre", torch.zeros(12))
        else:
            self.centre = nn.Parameter(torch.zeros(12), requires_grad=False)

    def forward(self, x):
        if self.training or self.always:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(0.1 * x.mean(0))
        return self.layer(x - self.centre)


@pytest.mark.parametrize(("buffer", "always"), [(False, False), (False, True), (True, True)])
def test_a_module_that_changes_what_tasks_share_is_refused(buffer, always):
    with pytest.raises(InputError, match="changes its tensor 'centre' while it runs"):
        Model(Centred(buffer, always), density=0.5).learn("a", examples(0), epochs=(1, 1))


class Shrinking(nn.Module):
    """Writes into the weight of its layer, which is handed in from outside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 2, bias=False)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        return self.layer(x)


def test_a_module_that_writes_into_its_weights_is_refused():
    with pytest.raises(InputError, match=r"changes its tensor 'layer\.weight' while it runs"):
        Model(Shrinking(), density=0.5).learn("a", examples(0), epochs=(1, 1))


def test_a_buffer_that_changes_in_training_only_is_private_and_safe():
    model = Model(Centred(buffer=True, always=False), density=0.5)
    model.learn("a", examples(0), epochs=(1, 1))
    before = model.logits(examples(0)[0], "a")
    model.learn("b", examples(1), epochs=(1, 1))
    assert torch.equal(model.logits(examples(0)[0], "a"), before)


def test_a_part_that_the_user_froze_is_neither_masked_nor_trained_nor_put_in_training_mode():
    encoder = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)).requires_grad_(False)
    module = nn.Sequential(encoder, nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 2))
    model = Model(module, density=0.3)
    model.learn("a", examples(0), epochs=(5, 5))
    assert [layer.name for layer in model._method.network.layout.layers] == ["1.weight", "3.weight"]
    assert model.tasks[0].private == {}  # the encoder's norm statistics did not move
    assert torch.equal(model.bake("a")[0][0].weight, encoder[0].weight)


@pytest.mark.parametrize("tied", ["layers", "embedding"])
def test_tied_weights_stay_tied(tied):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
            self.out = nn.Linear(16, 20 if tied == "embedding" else 2)
            self.two.weight = self.one.weight
            if tied == "embedding":
                self.out.weight = self.embedding.weight

        def forward(self, tokens):
            return self.out(self.two(torch.relu(self.one(self.embedding(tokens).mean(1)))))

    x, y = tokens()
    if tied == "embedding":
        y = y * 19
    model = Model(Tied(), density=0.4)
    model.learn("a", (x, y), epochs=(10, 10), batch_size=16)
    baked = model.bake("a")
    assert baked.two.weight is baked.one.weight
    with torch.no_grad():
        assert torch.equal(baked(x), model.logits(x, "a"))
    assert model.evaluate((x, y), "a") > 80


X, Y = examples(0)


def test_a_double_precision_module_learns_in_double_precision():
    model = Model(mlp().double(), density=0.2)
    model.learn("before", (X, 1 - Y), epochs=(1, 1))
    model.learn("a", (X, Y), epochs=(3, 3))  # after a transfer
    assert model.logits(X, "a").dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(model.bake("a")(X.double()), model.logits(X, "a"))


def test_a_module_whose_output_is_not_the_head_is_refused_with_advice():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(12, 5)
            self.gate = nn.Linear(12, 5)

        def forward(self, x):
            return self.out(x) + 0 * self.gate(x)[:, :1]

    with pytest.raises(InputError, match="name that one as head_layer"):
        Model(Odd(), density=0.5).learn("a", (X, Y), epochs=(1, 0))
    model = Model(Odd(), density=0.5, head_layer="out")
    model.learn("a", (X, Y), epochs=(1, 0))
    assert model.logits(np.asarray(X), "a").shape == (96, 2)
