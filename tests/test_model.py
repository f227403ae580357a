"""What a user of `exssnet.Model` relies on."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.core.networks import Transformer, examples, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import exssnet
from exssnet import ForgettingError, InputError, Model
from exssnet.core.initialise import fresh_scores
from exssnet.data import TensorData
from exssnet.data.tensors import Shared
from exssnet.models import build


class Lion(torch.optim.Optimizer):
    """Sign updates with momentum and decoupled decay: moves every parameter it is given at every step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * 0.1).sub_(group["lr"] * (0.9 * momentum + 0.1 * p.grad).sign())
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.01),
    "adam": lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.01),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
    "lion": Lion,
}


def learn_twenty(method, optimizer, **options):
    """A model after 20 tasks, and each task's logits as they were when it was learned."""
    torch.manual_seed(0)
    model = Model(mlp(), density=0.1, seed=0, method=method, **options)
    kept = {}
    for number in range(20):
        name = f"task {number}"
        model.learn(name, examples(number), epochs=(1, 2), optimizer=OPTIMIZERS[optimizer])
        kept[name] = model.logits(examples(number)[0], name)
    return model, kept


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"head": "task", "private": ("norm", "bias")}], ids=["shared", "private"])
def test_after_twenty_tasks_every_earlier_output_is_bitwise_unchanged(optimizer, options):
    model, kept = learn_twenty("exssnet+kkt", optimizer, **options)
    assert model.tasks[0].trained_weights > 0
    assert sum(task.trained_weights for task in model.tasks[1:]) > 0
    for number, (name, logits) in enumerate(kept.items()):
        assert torch.equal(model.logits(examples(number)[0], name), logits)
    assert model.verify().verified


def test_ssnet_changes_earlier_tasks_and_reports_it():
    model, kept = learn_twenty("ssnet", "adam")
    changed = [
        n for n, (name, old) in enumerate(kept.items()) if not torch.equal(model.logits(examples(n)[0], name), old)
    ]
    assert 0 in changed
    assert len(changed) > 10
    report = model.verify()
    assert not report.verified
    assert ("task 0", "0.weight") in report.changed


def test_supsup_never_moves_a_weight():
    model = Model(mlp(), seed=0, method="supsup")
    before = model._method.network.weights.clone()
    for number in range(3):
        model.learn(str(number), examples(number), epochs=(2, 2))
    assert torch.equal(model._method.network.weights, before)


@pytest.mark.parametrize(
    ("tamper", "task", "tensor"),
    [
        (lambda net: net.weights.__setitem__(net.mask("a").nonzero()[0], 9.0), "a", "0.weight"),
        (lambda net: net.tasks["a"].private["3.running_mean"].add_(1), "a", "3.running_mean"),
        (lambda net: net.bank.packed(0).zero_(), "a", "0.weight"),
    ],
    ids=["a used weight", "norm statistics", "mask bits"],
)
def test_a_changed_task_is_found_after_the_next_task_and_by_verify(tamper, task, tensor):
    model = Model(mlp(), seed=0)
    model.learn("a", examples(0), epochs=(1, 1))
    model.learn("b", examples(1), epochs=(1, 1))
    tamper(model._method.network)
    with pytest.raises(ForgettingError, match=f"task '{task}' changed after it was learned: tensor '{tensor}'"):
        model.verify()
    with pytest.raises(ForgettingError, match=f"task '{task}' changed"):
        model.learn("c", examples(2), epochs=(1, 1))


def test_stored_bits_of_many_tasks_are_checked_in_turn(monkeypatch):
    monkeypatch.setattr("exssnet.core.network.STORED_CHECKS", 2)
    model = Model(mlp(), seed=0, method="supsup")
    for number in range(4):
        model.learn(str(number), examples(number), epochs=(1, 0))
    model._method.network.bank.packed(1).zero_()

    def learn_on():
        for number in range(4, 9):
            model.learn(str(number), examples(number), epochs=(1, 0))

    with pytest.raises(ForgettingError, match="task '1' changed"):
        learn_on()


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


def tokens(rows=48):
    y = torch.arange(rows) % 2
    return torch.randint(0, 10, (rows, 8), generator=torch.Generator().manual_seed(0)) + 10 * y[:, None], y


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
    model = Model(module, density=0.3, seed=1, **options)
    model.learn("plain", (x, y), epochs=(20, 10), batch_size=16)
    model.learn("swapped", (x, 1 - y), epochs=(20, 10), batch_size=16)
    assert model.evaluate((x, y), "plain") > 90
    assert model.evaluate((x, 1 - y), "swapped") > 90

    for task in ("plain", "swapped"):
        baked = model.bake(task)
        assert type(baked) is type(module)
        with torch.no_grad():
            assert torch.equal(baked(x), model.logits(x, task))
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


def drawn(seed):
    """What a seed decides: weights, scores, the order of the batches, and the outcome."""

    class Watched(TensorData):
        read: ClassVar = []

        def batch(self, index, generator=None):
            if generator is not None:
                self.read.append(index)
            return super().batch(index, generator)

    model = Model(mlp(), density=0.2, seed=seed, method="exssnet")
    network = model._method.network
    weights, scores = network.weights.clone(), fresh_scores(network.layout, seed, "a")
    x, y = examples(0)
    watched = Watched(Shared(x), torch.arange(len(y)), y, 2)
    Watched.read = []
    watched.to = lambda device: watched
    model.learn("a", watched, epochs=(2, 2))
    return weights, scores, torch.cat(Watched.read), network.mask("a"), network.weights


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


@pytest.mark.parametrize("which", ["frozen", "buffers"])
def test_a_change_of_what_all_tasks_share_is_found(which):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 2)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Model(Scaled(), density=0.5)
    model.learn("a", examples(0), epochs=(1, 1))
    next(iter(getattr(model._method.network, which).values())).add_(1)
    with pytest.raises(ForgettingError, match="shared by all tasks"):
        model.verify()
    with pytest.raises(ForgettingError, match="shared by all tasks"):
        model.learn("b", examples(1), epochs=(1, 1))


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


def test_threads_may_ask_different_tasks_at_once():
    model = Model(mlp(), density=0.2)
    data = {name: examples(number) for number, name in enumerate("ab")}
    for name, (x, y) in data.items():
        model.learn(name, (x, y), epochs=(1, 1))
    expected = {name: model.logits(x, name) for name, (x, _) in data.items()}
    with ThreadPoolExecutor(4) as pool:
        names = ["a", "b"] * 200
        found = list(pool.map(lambda name: model.logits(data[name][0], name), names))
    assert all(torch.equal(logits, expected[name]) for name, logits in zip(names, found, strict=True))


def test_seeds_differ_in_weights_scores_and_order_and_equal_seeds_agree_bit_for_bit():
    torch.manual_seed(1)
    one = drawn(0)
    torch.manual_seed(2)  # the global random state plays no part
    for mine, same, other in zip(one, drawn(0), drawn(1), strict=True):
        assert torch.equal(mine, same)
        assert not torch.equal(mine, other)
    order = one[2].view(4, -1)  # one row per epoch
    assert all(len(set(row.tolist())) == 96 for row in order)
    assert not torch.equal(order[0], order[1])


def test_learning_leaves_the_callers_random_state_alone():
    model = Model(Transformer(), seed=0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model.learn("a", tokens(), epochs=(1, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_tasks_may_have_different_numbers_of_classes():
    shared = Model(mlp(classes=4), density=0.3)
    own = Model(mlp(classes=2), density=0.3, head="task")
    for number, classes in enumerate([2, 4, 3]):
        data = examples(number, classes=classes)
        for model in (shared, own):
            model.learn(f"{classes}", data, epochs=(5, 5))
            assert model.logits(data[0], f"{classes}").shape == (96, classes)
            assert model.evaluate(data, f"{classes}") > 80
            with torch.no_grad():
                baked = model.bake(f"{classes}")(data[0])
            assert torch.equal(baked, model.logits(data[0], f"{classes}"))
    own.learn("7", examples(3, classes=7), epochs=(5, 5))  # more than any before it
    with pytest.raises(InputError, match="7 classes but the shared head has 4 outputs"):
        shared.learn("7", examples(3, classes=7))


def test_with_no_free_weight_left_exssnet_is_supsup():
    x, y = examples(0)
    ex, sup = (Model(mlp(), density=1.0, method=method) for method in ("exssnet", "supsup"))
    for model in (ex, sup):
        model.learn("a", (x, y), epochs=(1, 0))  # density 1: everything is used
        model.learn("b", examples(1), epochs=(2, 5))
    assert ex.free == 0
    assert ex.tasks[1].trained_weights == 0
    assert ex.tasks[1].digests == sup.tasks[1].digests


def test_a_failed_task_leaves_the_model_as_it_was():
    model = Model(mlp(), seed=0)
    model.learn("a", examples(0), epochs=(1, 1))
    weights, cards = model._method.network.weights.clone(), [t.card() for t in model.tasks]

    def stop(parameters, lr):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.learn("b", examples(1), optimizer=stop)
    assert torch.equal(model._method.network.weights, weights)
    assert [t.card() for t in model.tasks] == cards
    model.learn("b", examples(1), epochs=(1, 1))
    assert model.verify().verified


def test_best_selection_keeps_each_phases_best_epoch_on_validation_data():
    seen = []

    class Ear(exssnet.train.Listener):
        def epoch_ended(self, report):
            seen.append((report.phase, report.validation))

    train, held = examples(0, rows=32), examples(0, rows=400)
    model = Model(mlp(), seed=0)

    def climbing(parameters, lr):  # up the loss in phase 2, so that its first epoch is the best
        return torch.optim.SGD(parameters, lr, maximize=len(seen) >= 6)

    model.learn("a", train, epochs=(6, 6), validation=held, select="best", optimizer=climbing, listener=Ear())
    best = max(validation for phase, validation in seen if phase == "weights")
    assert seen[-1][1] < best  # otherwise the test shows nothing
    assert model.evaluate(held, "a") == best


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


def test_features_are_right_while_other_threads_ask_for_logits():
    model = Model(mlp(), density=0.2)
    for number, name in enumerate("ab"):
        model.learn(name, examples(number), epochs=(1, 1))
    network = model._method.network
    wanted = {name: network.features(X, name) for name in "ab"}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(network.logits, X[:50] + 1, "ab"[i % 2]) for i in range(200)]
        found = list(pool.map(lambda name: (name, network.features(X, name)), ["a", "b"] * 100))
        assert all(future.result().shape == (50, 2) for future in asked)
    assert all(torch.equal(features, wanted[name]) for name, features in found)


def test_a_double_precision_module_learns_in_double_precision():
    model = Model(mlp().double(), density=0.2)
    model.learn("before", (X, 1 - Y), epochs=(1, 1))
    model.learn("a", (X, Y), epochs=(3, 3))  # after a transfer
    assert model.logits(X, "a").dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(model.bake("a")(X.double()), model.logits(X, "a"))


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


def test_weights_are_the_signed_constant_and_scores_are_drawn_anew_for_each_task():
    network = Model(mlp(), seed=3)._method.network
    for layer in network.layout.layers:
        piece = network.layout.tensors(network.weights)[layer.name]
        assert torch.allclose(piece.abs(), torch.full_like(piece, (2 / layer.fan_in) ** 0.5))
        assert 0.3 < float((piece > 0).double().mean()) < 0.7
    scores = [exssnet.core.initialise.fresh_scores(network.layout, 3, name) for name in ("a", "b")]
    assert not torch.equal(*scores)
    for layer, piece in zip(network.layout.layers, network.layout.slices(scores[0]), strict=True):
        assert float(piece.abs().max()) <= layer.fan_in**-0.5
        assert float(piece.abs().max()) > 0.7 * layer.fan_in**-0.5
