"""The loop and the fast path against the reference, and snapshots inside a task."""

import copy

import pytest
import torch
from tests.core.networks import mlp, task
from torch.nn.functional import linear, relu

from exssnet import randomness
from exssnet.core import reference
from exssnet.methods import parse
from exssnet.methods.supsup import MaskSettings
from exssnet.train import Listener, Trainer, TrainSettings, checkpoint

PLAIN_ADAM = TrainSettings(batch_size=32, optimizer=lambda p, lr: torch.optim.Adam(p, lr, foreach=False))


def plain_mlp():
    from torch import nn

    return nn.Sequential(
        nn.Linear(12, 30, bias=False), nn.ReLU(), nn.Linear(30, 30, bias=False), nn.ReLU(), nn.Linear(30, 2, bias=False)
    )


def forward(weights, x):
    return linear(relu(linear(relu(linear(x, weights[0])), weights[1])), weights[2])


def batches(task, phase, epochs, seed):
    """The batches the loop draws, handed to the reference."""
    found = []
    for epoch in range(epochs):
        draw = randomness.generator(seed, "order", task.name, phase, epoch)
        order = torch.randperm(len(task.train), generator=draw)
        found.append([task.train.batch(index) for index in order.split(32)])
    return found


@pytest.mark.parametrize("name", ["supsup", "exssnet", "ssnet"])
def test_three_tasks_learned_by_the_loop_equal_three_tasks_of_the_reference(name):
    seed, density, epochs = 0, 0.3, 4
    settings = MaskSettings(density=density, mask_epochs=epochs, weight_epochs=epochs, lr=0.01, weight_lr=0.003)
    method = parse(name)[0](plain_mlp(), settings, seed)
    network = method.network
    weights = [t.clone() for t in network.layout.tensors(network.weights).values()]
    trainer = Trainer(method, seed, PLAIN_ADAM)
    earlier = []
    for number in range(3):
        new = task(number)
        from exssnet.core.initialise import fresh_scores

        scores = list(network.layout.tensors(fresh_scores(network.layout, seed, new.name)).values())
        scores = reference.learn_mask(forward, weights, scores, batches(new, "mask", epochs, seed), density, 0.01)
        masks = [reference.mask(s, density) for s in scores]
        if name != "supsup":
            free = reference.free(masks, earlier) if name == "exssnet" else masks
            data = batches(new, "weights", epochs, seed)
            weights = reference.learn_free_weights(forward, weights, masks, free, data, 0.003)
        trainer.learn(new)
        learned = list(network.layout.tensors(network.mask(new.name)).values())
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(learned, masks, strict=True))
        assert network.tasks[new.name].overlap == (reference.sparse_overlap(masks, earlier) if earlier else None)
        earlier.append(masks)
        found = network.layout.tensors(network.weights).values()
        assert all(torch.allclose(w, r, atol=1e-6) for w, r in zip(found, weights, strict=True))


@pytest.mark.parametrize("select", ["last", "best"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adamw"])
def test_a_task_goes_on_from_a_snapshot_of_any_epoch_as_if_nothing_had_happened(tmp_path, select, optimizer):
    settings = MaskSettings(density=0.2, mask_epochs=3, weight_epochs=3, kkt=True)
    first, second = task(0), task(1)
    if select == "best":
        from dataclasses import replace

        second = replace(second, validation=task(1, rows=50).train)
        first = replace(first, validation=task(0, rows=50).train)
    train = TrainSettings(16, optimizer, select)

    def fresh():
        return parse("exssnet+kkt")[0](mlp(), settings, seed=0)

    whole = fresh()
    files = []

    def save():
        path = tmp_path / f"{len(files)}"
        tensors, facts = trainer.snapshot()
        checkpoint.write(path, tensors, facts)
        files.append(path)

    trainer = Trainer(whole, 0, train, after_epoch=save)
    trainer.learn(first)
    state = copy.deepcopy(whole.state())
    files.clear()
    trainer.learn(second)
    assert len(files) == 6
    for path in files:
        again = fresh()
        again.load_state(*state)
        Trainer(again, 0, train).learn(second, checkpoint.read(path))
        assert again.network.tasks["task-1"].digests == whole.network.tasks["task-1"].digests


def test_a_last_batch_of_one_is_left_out_since_batch_statistics_need_two():
    method = parse("exssnet")[0](mlp(), MaskSettings(density=0.2, mask_epochs=1, weight_epochs=1), seed=0)
    Trainer(method, 0, TrainSettings(batch_size=16)).learn(task(0, rows=33))
    assert list(method.network.tasks) == ["task-0"]


@pytest.mark.parametrize(("schedule", "rates"), [("constant", [0.01, 0.01]), ("cosine", [0.01, 0.005])])
def test_the_rate_follows_the_schedule_over_every_phase(schedule, rates):
    heard = []

    class Ear(Listener):
        def epoch_ended(self, report):
            heard.append(report.lr)

    settings = MaskSettings(density=0.2, mask_epochs=2, weight_epochs=2, lr=0.01, weight_lr=0.01)
    method = parse("exssnet")[0](mlp(), settings, seed=0)
    Trainer(method, 0, TrainSettings(schedule=schedule), Ear()).learn(task(0))
    assert heard == pytest.approx(rates + rates)


def test_listeners_hear_tasks_phases_and_epochs_in_order():
    heard = []

    class Ear(Listener):
        def task_started(self, index, name):
            heard.append(name)

        def phase_started(self, name, epochs, done):
            heard.append((name, epochs, done))

        def epoch_ended(self, report):
            heard.append((report.phase, report.epoch, report.lr))

    settings = MaskSettings(density=0.2, mask_epochs=2, weight_epochs=1, lr=0.01, weight_lr=0.002)
    Trainer(parse("exssnet")[0](mlp(), settings, seed=0), 0, listener=Ear()).learn(task(0))
    assert heard == [
        "task-0", ("mask", 2, 0), ("mask", 1, 0.01), ("mask", 2, pytest.approx(0.005)),
        ("weights", 1, 0), ("weights", 1, 0.002),
    ]  # fmt: skip
