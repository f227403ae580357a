"""What a user of `exssnet.Model` relies on: no task forgets, seeds decide, tasks come as they come."""

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from tests.core.networks import Transformer, examples, mlp, tokens
from torch import nn

import exssnet
from exssnet import ForgettingError, InputError, Model
from exssnet.core.init import fresh_scores
from exssnet.data import TensorData
from exssnet.data.tensors import Shared


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
@pytest.mark.parametrize("options", [{}, {"head": "task"}], ids=["shared", "private"])
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
                baked = model.bake(f"{classes}")
                assert torch.equal(baked(data[0]), model.logits(data[0], f"{classes}"))
            assert baked[-1].out_features == len(baked[-1].weight) == classes
        network = shared._method.network  # a task has the first of the outputs that all share
        rows = network.effective(f"{classes}")["5.weight"][:classes]
        found = shared.logits(data[0], f"{classes}")
        torch.testing.assert_close(found, network.features(data[0], f"{classes}") @ rows.T)
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


X, Y = examples(0)


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


def test_weights_are_the_signed_constant_and_scores_are_drawn_anew_for_each_task():
    network = Model(mlp(), seed=3)._method.network
    for layer in network.layout.layers:
        piece = network.layout.tensors(network.weights)[layer.name]
        assert torch.allclose(piece.abs(), torch.full_like(piece, (2 / layer.fan_in) ** 0.5))
        assert 0.3 < float((piece > 0).double().mean()) < 0.7
    scores = [exssnet.core.init.fresh_scores(network.layout, 3, name) for name in ("a", "b")]
    assert not torch.equal(*scores)
    for layer, piece in zip(network.layout.layers, network.layout.slices(scores[0]), strict=True):
        assert float(piece.abs().max()) <= layer.fan_in**-0.5
        assert float(piece.abs().max()) > 0.7 * layer.fan_in**-0.5
