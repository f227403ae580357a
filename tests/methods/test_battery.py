"""What every method must pass, whatever it is."""

import json

import pytest
import torch

from exssnet.experiments.config import resolve
from exssnet.experiments.run import prepare, run
from exssnet.methods import describe, methods, parse, transfers
from exssnet.train import Trainer, accuracy, checkpoint

NAMES = [name + suffix for name in methods() for suffix in ("", "+kkt") if not suffix or transfers(name)]
SHORT = {"tasks": 3, "mask_epochs": 6, "weight_epochs": 6}

every_method = pytest.mark.parametrize("name", NAMES)


def config(name, **changes):
    return resolve("split-digits", name, 0, **(SHORT | changes))


@every_method
@pytest.mark.parametrize("head", ["shared", "task"])
def test_it_learns_a_stream_of_unequal_tasks_well_above_chance(tmp_path, name, head):
    record = run(config(name, head=head), tmp_path)
    assert [len(group) for group in record["class_order"]] == [4, 3, 3]
    learned = [record["accuracy_matrix"][i][i] for i in range(3)]
    assert min(learned) > 70
    assert record["config"]["head"] == head
    assert all(seconds >= 0 for task in record["seconds"]["tasks"] for seconds in task.values())


@every_method
def test_the_same_seed_gives_the_same_record(tmp_path, name):
    one, two = (run(config(name, mask_epochs=2, weight_epochs=1), tmp_path / out) for out in "ab")
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


@every_method
def test_its_state_survives_a_round_trip_through_a_checkpoint(tmp_path, name):
    stream, method = prepare(config(name, mask_epochs=2, weight_epochs=2))
    trainer = Trainer(method, 0)
    for index in range(2):
        trainer.learn(stream[index])
    tensors, facts = method.state()
    checkpoint.write(tmp_path / "c", tensors, facts)
    _, again = prepare(config(name, mask_epochs=2, weight_epochs=2))
    again.load_state(*checkpoint.read(tmp_path / "c"))
    for index in range(2):
        x, _ = stream[index].test.batch(torch.arange(50))
        assert torch.equal(method.logits(x, f"task{index + 1}"), again.logits(x, f"task{index + 1}"))
    Trainer(again, 0).learn(stream[2])
    trainer.learn(stream[2])
    assert json.dumps(method.state()[1]) == json.dumps(again.state()[1])


@every_method
def test_a_task_of_one_batch_is_learned(name):
    stream, method = prepare(config(name, samples_per_class=8, mask_epochs=15, weight_epochs=15))
    Trainer(method, 0).learn(stream[0])
    assert accuracy(lambda x: method.logits(x, "task1"), stream[0].train) > 60


@every_method
@pytest.mark.parametrize("broken", ["weights", "task.0.mask"])
def test_a_checkpoint_that_was_tampered_with_is_refused_by_a_method_that_proves(name, broken):
    from exssnet.errors import ForgettingError

    stream, method = prepare(config(name, mask_epochs=1, weight_epochs=1))
    Trainer(method, 0).learn(stream[0])
    tensors, facts = method.state()
    changed = tensors[broken].clone()
    if broken == "weights":
        changed[method.network.bank.used.nonzero()[0]] += 1
    else:
        changed[0] ^= 255
    _, again = prepare(config(name, mask_epochs=1, weight_epochs=1))
    if method.exclusive:
        with pytest.raises(ForgettingError, match="task 'task1' changed"):
            again.load_state({**tensors, broken: changed}, facts)
    else:
        again.load_state({**tensors, broken: changed}, facts)
        assert not again.verify().verified


def test_every_method_has_a_line_that_describes_it():
    assert describe().keys() == methods().keys()
    assert all(20 < len(line) < 110 and line.endswith(".") for line in describe().values())


def test_names_with_and_without_kkt_are_parsed():
    assert parse("exssnet+kkt") == (methods()["exssnet"], True)
    assert parse("supsup") == (methods()["supsup"], False)
