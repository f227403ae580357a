"""The loop and the fast path against the reference, and snapshots inside a task."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.core.networks import examples, mlp, task
from torch.nn.functional import linear, relu

from exssnet import randomness
from exssnet.core import reference
from exssnet.core.selection import select
from exssnet.data.tensors import Shared, TensorData
from exssnet.errors import InputError
from exssnet.methods import parse
from exssnet.methods.masks.supsup import MaskSettings
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
        from exssnet.core.init import fresh_scores

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


def test_every_epoch_of_every_phase_has_augmentation_of_its_own():
    heard = []

    class Heard(TensorData):
        def batch(self, index, generator=None):
            if generator is not None:
                heard.append(generator.initial_seed())
            return super().batch(index, generator)

    def seeds(seed):
        heard.clear()
        method = parse("exssnet")[0](mlp(), MaskSettings(density=0.2, mask_epochs=3, weight_epochs=2), seed=0)
        for number in range(2):
            x, y = examples(number)
            data = Heard(Shared(x), torch.arange(len(y)), y, 2)
            Trainer(method, seed, TrainSettings(96)).learn(replace(task(number), train=data))
        return list(heard)  # one batch an epoch

    assert len(set(seeds(0))) == 2 * (3 + 2)
    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))


def test_what_a_module_draws_follows_from_the_seed_and_not_from_what_was_drawn_before(tmp_path):
    """Dropout, in a run that goes on from its first epoch as in one that was not cut off."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Dropout(0.5), torch.nn.Linear(30, 2))
    settings = MaskSettings(density=0.5, mask_epochs=3, weight_epochs=2)

    def learned(seed, drawn_before, snapshot=None, save=lambda _: None):
        torch.manual_seed(drawn_before)
        method = parse("exssnet")[0](module, settings, seed=0)
        trainer = Trainer(method, seed, TrainSettings(16), after_epoch=lambda: save(trainer.snapshot()))
        trainer.learn(task(0), snapshot)
        return method.network.tasks["task-0"].digests

    def keep_first(snapshot):
        if not (tmp_path / "first").exists():
            checkpoint.write(tmp_path / "first", *snapshot)

    whole = learned(0, 1, save=keep_first)
    assert learned(0, 2) == whole
    assert learned(0, 3, checkpoint.read(tmp_path / "first")) == whole


def test_a_module_draws_other_numbers_in_every_epoch_of_every_phase_and_for_every_seed():
    drawn = []

    class Drawing(torch.nn.Dropout):
        def forward(self, x):
            if self.training and len(x) == 96:
                drawn.append(torch.initial_seed())
            return super().forward(x)

    module = torch.nn.Sequential(torch.nn.Linear(12, 30), Drawing(0.5), torch.nn.Linear(30, 2))
    for seed in (0, 1):
        method = parse("exssnet")[0](module, MaskSettings(density=0.5, mask_epochs=3, weight_epochs=2), seed=0)
        for number in range(2):
            Trainer(method, seed, TrainSettings(96)).learn(task(number))  # one batch an epoch
    assert len(set(drawn)) == len(drawn) == 2 * 2 * (3 + 2)


def test_what_the_last_step_ruins_is_told_before_the_task_is_committed():
    """The loss of that step was finite, and so are the weights; what they compute is not."""
    settings = MaskSettings(density=0.5, mask_epochs=1, weight_epochs=1, weight_lr=1e30)
    method = parse("exssnet")[0](plain_mlp(), settings, seed=0)
    train = TrainSettings(batch_size=96, optimizer="sgd")
    with pytest.raises(InputError, match=r"an output became infinite in task 'task-0', phase weights, epoch 1: lower"):
        Trainer(method, 0, train).learn(task(0))
    assert not method.network.tasks


def test_of_epochs_that_are_as_good_the_first_is_kept(monkeypatch):
    monkeypatch.setattr("exssnet.train.loop.accuracy", lambda *_: 50.0)
    settings, new = MaskSettings(density=0.3, mask_epochs=4), replace(task(0), validation=task(0).train)
    epochs, kept = [], parse("supsup")[0](mlp(), settings, seed=0)

    def keep():
        if len(epochs) < 3:  # what the last one leaves is replaced by the best
            epochs.append(kept.subnetwork.scores.detach().clone())

    Trainer(kept, 0, TrainSettings(select="best"), after_epoch=keep).learn(new)
    masks = [select(scores, kept.network.layout, kept.network.keep) for scores in epochs]
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(kept.network.mask("task-0"), masks[0])


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
