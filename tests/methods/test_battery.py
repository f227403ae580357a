"""What every method must pass, whatever it is."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from tests.stopping import cut_after

from exssnet.core.engine import Engine
from exssnet.errors import ForgettingError, InputError
from exssnet.experiments.config import resolve, resolve_all
from exssnet.experiments.prepare import computing, prepare
from exssnet.experiments.run import run
from exssnet.methods import describe, general, methods, parse, transfers
from exssnet.methods.base import JointMethod
from exssnet.methods.masks._base import Isolated
from exssnet.train import Trainer, accuracy, checkpoint

NAMES = [name + suffix for name in general() for suffix in ("", "+kkt") if not suffix or transfers(name)]
SHORT = {"mask_epochs": 6, "weight_epochs": 6, "epochs": 8, "retrain_epochs": 4, "buffer": 100.0}
FEW = {"mask_epochs": 2, "weight_epochs": 1, "epochs": 2, "retrain_epochs": 1, "buffer": 30.0}
PROVED = [name for name in NAMES if issubclass(parse(name)[0], Isolated)]

every_method = pytest.mark.parametrize("name", NAMES)
every_head = pytest.mark.parametrize(
    ("name", "head"), [(name, head) for name in NAMES for head in parse(name)[0].heads]
)
gpu = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def config(name, times=SHORT, **changes):
    """Three tasks of 4, 3 and 3 digits; of the times those that the method has."""
    known = {n: value for n, value in times.items() if hasattr(parse(name)[0].settings_type, n)}
    return resolve("split-digits", name, 0, **({"tasks": 3, "device": "cpu"} | known | changes))


def learn(method, stream, trainer=None, first=0, last=3, device="cpu"):
    trainer = trainer or Trainer(method, 0)
    tasks = [replace(task, train=task.train.to(device)) for task in stream]
    for task in [method.together(tasks)] if isinstance(method, JointMethod) else tasks[first:last]:
        trainer.learn(task)


@every_head
@pytest.mark.parametrize("device", ["cpu", gpu])
def test_it_learns_a_stream_of_unequal_tasks_well_above_chance(tmp_path, name, head, device):
    record = run(config(name, head=head, device=device), tmp_path)
    assert [len(group) for group in record["class_order"]] == [4, 3, 3]
    learned = [a for i, a in enumerate([record["accuracy_matrix"][i][i] for i in range(3)]) if a is not None]
    assert min(learned) > 55  # chance is 25 or 33 %; a strong penalty leaves little room in so few epochs
    assert record["average_accuracy"] > 45
    assert record["config"]["head"] == head
    assert all(seconds >= 0 for task in record["seconds"]["tasks"] for seconds in task.values())
    assert sum(record["storage"].values()) > 0


@every_method
@pytest.mark.parametrize("device", ["cpu", gpu])
def test_the_same_seed_gives_the_same_record(tmp_path, name, device):
    one, two = (run(config(name, FEW, device=device), tmp_path / out) for out in "ab")
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


@every_method
def test_its_state_survives_a_round_trip_through_a_checkpoint(tmp_path, name):
    stream, method = prepare(config(name, FEW))
    trainer = Trainer(method, 0)
    learn(method, stream, trainer, last=2)
    tensors, facts = method.state()
    checkpoint.write(tmp_path / "c", tensors, facts)
    _, again = prepare(config(name, FEW))
    again.load_state(*checkpoint.read(tmp_path / "c"))
    for index in range(2):
        x, _ = stream[index].test.batch(torch.arange(50))
        assert torch.equal(method.logits(x, f"task{index + 1}"), again.logits(x, f"task{index + 1}"))
    if isinstance(method, JointMethod):
        return
    learn(again, stream, first=2)
    learn(method, stream, trainer, first=2)
    assert json.dumps(method.state()[1]) == json.dumps(again.state()[1])
    one, two = method.state()[0], again.state()[0]
    assert one.keys() == two.keys()
    assert all(torch.equal(one[tensor], two[tensor]) for tensor in one)


@every_method
@pytest.mark.parametrize("epochs", [1, 2, 5])
@pytest.mark.parametrize("device", ["cpu", gpu])
def test_a_run_that_is_cut_off_and_taken_up_gives_the_same_record(tmp_path, monkeypatch, name, epochs, device):
    planned = config(name, FEW, device=device)
    if issubclass(parse(name)[0], JointMethod):
        planned, epochs = config(name, {"epochs": 6}, device=device), min(epochs, 4)
    whole = run(planned, tmp_path / "whole")
    with cut_after(monkeypatch, epochs):
        run(planned, tmp_path / "cut", checkpoint_seconds=0)
    again = run(planned, tmp_path / "cut")
    assert {**again, "seconds": 0} == {**whole, "seconds": 0}


@every_method
@pytest.mark.parametrize("network", [{}, {"network": "resnet18", "width": 4.0}])
@pytest.mark.parametrize("device", [gpu])
def test_captured_steps_leave_what_single_steps_leave_bit_for_bit(monkeypatch, name, network, device):
    states = []
    for single in (False, True):
        if single:
            monkeypatch.setattr("exssnet.engine.cuda.engine.CudaEngine.loop", Engine.loop)
        planned = config(name, FEW, device=device, compile="off", **network)
        with computing(planned):
            stream, method = prepare(planned)
            learn(method, stream, device=device, last=2)
        states.append(method.state()[0])
    assert all(torch.equal(states[0][tensor], states[1][tensor]) for tensor in states[0])


@pytest.mark.slow
@every_method
def test_a_run_that_is_killed_is_taken_up_by_another_process(exssnet, tmp_path, name):
    planned = config(name, FEW | {"epochs": 12, "mask_epochs": 12})  # long enough to be killed before it ends
    whole = run(planned, tmp_path / "whole")
    (tmp_path / "config.yaml").write_text(planned.to_yaml())
    command = ("run", "--config", tmp_path / "config.yaml", "--out", tmp_path / "killed", "--checkpoint-seconds", 0)
    process = exssnet.start(*command)
    log = tmp_path / "killed" / planned.folder / "log.jsonl"
    patience = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < patience
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    assert exssnet.wait(process).returncode == -signal.SIGKILL  # it had not ended by itself
    folder = tmp_path / "killed" / planned.folder
    assert (folder / "checkpoint.safetensors").exists()
    assert not (folder / "results.json").exists()
    again = run(planned, tmp_path / "killed")
    assert {**again, "seconds": 0} == {**whole, "seconds": 0}


@every_method
def test_a_task_of_one_batch_is_learned(name):
    stream, method = prepare(config(name, dict.fromkeys(SHORT, 15), samples_per_class=8))
    learn(method, stream, last=1)
    assert accuracy(lambda x: method.logits(x, "task1"), stream[0].train) > 60


@pytest.mark.parametrize("name", PROVED)
@pytest.mark.parametrize("broken", ["weights", "task.0.mask"])
def test_a_checkpoint_that_was_tampered_with_is_refused_by_a_method_that_proves(name, broken):
    stream, method = prepare(config(name, FEW))
    Trainer(method, 0).learn(stream[0])
    tensors, facts = method.state()
    changed = tensors[broken].clone()
    if broken == "weights":
        changed[method.network.bank.used.nonzero()[0]] += 1
    else:
        changed[0] ^= 255
    _, again = prepare(config(name, FEW))
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


@every_method
def test_a_head_that_a_method_does_not_have_is_refused(name):
    with pytest.raises(InputError, match="head is 'no': choose one of"):
        config(name, head="no")


FORGETS_LESS = {
    "er": {}, "agem": {}, "der": {}, "der++": {}, "icarl": {}, "lwf": {}, "ewc-online": {"strength": 1e4},
    "si": {"strength": 100.0},
}  # fmt: skip


@pytest.mark.parametrize("name", FORGETS_LESS)
def test_what_is_against_forgetting_forgets_less_than_nothing_does(tmp_path, name):
    naive = run(config("naive", head="masked-test"), tmp_path)
    less = run(config(name, head="masked-test", **FORGETS_LESS[name]), tmp_path)
    assert less["average_accuracy"] > naive["average_accuracy"] + 3
    assert less["forgetting"] < naive["forgetting"] - 3


def test_a_number_of_epochs_is_shared_out_among_the_phases():
    for name, kind in methods().items():
        benchmark = "webnlp-s2" if kind.trains_encoder else "split-digits"
        for epochs in (1, 2, 3, 10, 30):
            planned = resolve(benchmark, name, 0, epochs=epochs)
            assert kind.settings_type(**planned.settings).epochs_per_task == epochs


def test_of_several_methods_each_gets_the_settings_it_knows():
    plans = resolve_all("split-digits", ["er", "exssnet"], [0], epochs=3, mask_epochs=2, head="masked-test")
    assert [plan.head for plan in plans] == ["masked-test", "shared"]
    assert plans[0].settings["epochs"] == 3
    assert plans[1].settings["mask_epochs"] == 2
    with pytest.raises(InputError, match="no setting 'colour'"):
        resolve_all("split-digits", ["er", "exssnet"], [0], colour=1)
