"""The forms that examples come in, and what is refused or explodes in one line that says where."""

import pytest
import torch
from tests.core.networks import examples, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from exssnet import InputError, Model


@pytest.mark.parametrize("form", ["tensors", "arrays", "dataset", "loader", "float64", "uint8"])
def test_examples_come_as_tensors_arrays_datasets_or_loaders(form):
    x, y = examples(0)
    pair = {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=7),
        "float64": (x.double(), y.int()),
        "uint8": ((x * 10 + 128).clamp(0, 255).to(torch.uint8), y),
    }[form]
    model = Model(mlp(), seed=0)
    model.learn("a", pair, epochs=(3, 3))
    assert model.evaluate(pair, "a") > 65
    if form in ("tensors", "arrays", "dataset", "loader", "float64"):
        straight = Model(mlp(), seed=0)
        straight.learn("a", (x, y), epochs=(3, 3))
        assert model.tasks[0].digests == straight.tasks[0].digests
    probabilities = model.probabilities(x, "a")
    assert torch.allclose(probabilities.sum(1), torch.ones(96))
    assert torch.equal(model.predict(x.numpy(), "a"), probabilities.argmax(1))


X, Y = examples(0)
BAD = {
    "a task with one class": ((X, torch.zeros(96, dtype=torch.long)), {}, "at least two classes"),
    "one class of two": ((X, torch.zeros(96, dtype=torch.long)), {"classes": 2}, "at least two classes"),
    "one class asked for": ((X, Y), {"classes": 1}, "at least two classes"),
    "a label too large": ((X, Y + 5), {"classes": 2}, "label 5 of example 0 is not in 0 to 1"),
    "more classes than outputs": ((X, Y + 5), {}, "7 classes but the shared head has 2 outputs"),
    "a negative label": ((X, Y - 1), {}, "label -1 of example 0"),
    "NaN": ((torch.where(X > 2, float("nan"), X), Y), {}, "NaN or infinity"),
    "infinity": ((X / 0.0, Y), {}, "NaN or infinity"),
    "no examples": ((X[:0], Y[:0]), {}, "at least one example"),
    "unequal lengths": ((X, Y[:5]), {}, "96 inputs but 5 labels"),
    "float labels": ((X, Y.float()), {}, "give integers"),
    "not examples": (3, {}, "give a pair"),
    "no epochs": ((X, Y), {"epochs": (0, 1)}, "mask_epochs is 0"),
    "negative rate": ((X, Y), {"lr": -1.0}, "lr is -1.0"),
    "negative decay": ((X, Y), {"weight_decay": -1.0}, "weight_decay is -1.0"),
    "no batch": ((X, Y), {"batch_size": 0}, "batch_size is 0"),
    "unknown optimizer": ((X, Y), {"optimizer": "adm"}, "did you mean adam"),
    "best without validation": ((X, Y), {"select": "best"}, "needs a validation part"),
    "inputs of another size": ((X[:, :5], Y), {}, "inputs of shape"),
    "one number of epochs": ((X, Y), {"epochs": 5}, "epochs is 5: give two whole numbers"),
    "half an epoch": ((X, Y), {"epochs": (1.5, 1)}, "give two whole numbers"),
    "half a batch": ((X, Y), {"batch_size": 1.5}, "batch_size is 1.5"),
    "validation of another size": ((X, Y), {"validation": (X[:, :5], Y)}, "inputs of shape"),
    "batches of one with batch statistics": ((X, Y), {"batch_size": 1}, "batch"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(case):
    examples, options, message = BAD[case]
    model = Model(mlp(), seed=0)
    with pytest.raises(InputError, match=message) as error:
        model.learn("a", examples, **options)
    assert "\n" not in str(error.value)
    assert model.tasks == ()


def test_a_loss_that_explodes_is_an_error_that_says_where():
    with pytest.raises(InputError, match=r"the loss became \w+ in task 'a', phase weights, epoch \d+: lower"):
        Model(mlp(), seed=0).learn("a", (X, Y), epochs=(1, 3), weight_lr=1e30)


def test_a_last_step_that_explodes_is_found_though_no_loss_follows_it():
    model = Model(mlp(), seed=0)
    with pytest.raises(InputError, match="phase weights, epoch 1: lower the learning rate"):
        model.learn("a", (X, Y), epochs=(1, 1), batch_size=96, optimizer="sgd", weight_lr=3e38)
    assert model.tasks == ()


def test_scores_that_are_no_numbers_are_found_though_the_loss_is_finite():
    class Root(nn.Module):
        """Its gradient is not a number where the root is of zero."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(12, 16, bias=False), nn.Linear(16, 2, bias=False)

        def forward(self, x):
            return self.b((0 * self.a(x)).square().sqrt() + self.a(x))

    model = Model(Root(), density=0.3)
    with pytest.raises(InputError, match="lower the learning rate"):
        model.learn("a", (X, Y), epochs=(1, 1))
    assert model.tasks == ()


def test_a_name_that_is_taken_or_not_learned_is_refused():
    model = Model(mlp(), seed=0)
    model.learn("a", (X, Y), epochs=(1, 0))
    with pytest.raises(InputError, match="task 'a' has been learned already"):
        model.learn("a", (X, Y))
    with pytest.raises(InputError, match=r"no task 'b' has been learned \(learned: a\)"):
        model.predict(X, "b")
    with pytest.raises(InputError, match="NaN or infinity"):
        model.predict(X * float("nan"), "a")
    with pytest.raises(InputError, match="inputs of shape"):
        model.predict(X[:, :5], "a")
    with pytest.raises(InputError, match="the module is a int: give"):
        Model(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density is 0.0"),
        ({"density": 1.5}, "density is 1.5"),
        ({"density": 0.001}, "without a weight"),
        ({"method": "exsnet"}, "unknown method 'exsnet': did you mean exssnet"),
        ({"init": "zero"}, "init is 'zero'"),
        ({"head": "none"}, "head is 'none'"),
        ({"private": ("nrom",)}, "private 'nrom' matches no parameter"),
        ({"density": "0.1"}, "density is 0.1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"device": "gpu"}, "device 'gpu' cannot be used"),
    ],
)
def test_a_model_that_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Model(mlp(), **options)
