"""Runs as a user makes them: what they record, what they refuse, and what they leave alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tests.experiments.short_runs import outcome, short

from exssnet.errors import InputError, RunError
from exssnet.experiments.config import resolve
from exssnet.experiments.prepare import prepare, train_settings
from exssnet.experiments.run import _Run, run
from exssnet.methods import parse
from exssnet.train import Listener, Trainer

KEYS = {
    "benchmark", "method", "seed", "tasks", "class_order", "accuracy_matrix", "average_accuracy", "forgetting",
    "sparse_overlap", "average_sparse_overlap", "zero_forgetting", "transfer", "storage", "seconds", "device",
    "versions", "data_digests",
}  # fmt: skip


@pytest.mark.parametrize("method", ["supsup", "ssnet", "exssnet", "supsup+kkt", "ssnet+kkt", "exssnet+kkt"])
def test_a_run_leaves_config_log_and_a_full_record(tmp_path, method):
    record = run(short(method), tmp_path)
    folder = tmp_path / "split-digits" / method / "seed-0"
    assert {file.name for file in folder.iterdir()} == {"config.yaml", "log.jsonl", "results.json"}
    assert json.loads((folder / "results.json").read_text()) == record
    assert record.keys() >= KEYS
    assert yaml.safe_load((folder / "config.yaml").read_text())["settings"]["density"] == 0.1

    matrix = record["accuracy_matrix"]
    assert [[a is not None for a in row] for row in matrix] == [[True] * (i + 1) + [False] * (2 - i) for i in range(3)]
    assert record["average_accuracy"] == pytest.approx(sum(matrix[-1]) / 3)
    assert record["sparse_overlap"][0] is None
    assert 0 < record["average_sparse_overlap"] < 1
    assert sorted(label for group in record["class_order"] for label in group) == list(range(10))
    proof = record["zero_forgetting"]
    assert len(proof["digests"]) == 3
    assert proof["verified"] == (not method.startswith("ssnet"))
    if proof["verified"]:
        assert record["forgetting"] == 0
        assert proof["changed"] == []
    lenders = [transfer["lender"] for transfer in record["transfer"]]
    assert lenders[0] is None
    assert any(lenders) == method.endswith("+kkt")
    assert len(record["seconds"]["tasks"]) == 3
    assert set(record["seconds"]["tasks"][0]) == {"setup", "mask", "evaluation"} | (
        set() if method.startswith("supsup") else {"weights"}
    )

    storage = record["storage"]
    weights = 64 * 300 + 300 * 100 + 100 * 4
    assert storage["mask_bits"] == 3 * weights
    assert storage["private_bits"] == 0
    trained = {"supsup": 0, "ssnet": 1, "exssnet": 1}[method.removesuffix("+kkt")]
    assert storage["paper_formula_bits"] == trained * 32 * round(0.3 * weights) + 3 * weights
    assert (storage["weight_bits"] > 0) == bool(trained)
    assert storage["weight_bits"] <= trained * 32 * round(0.3 * weights)

    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("task") == 3
    assert sum(event["event"] == "epoch" for event in events) == 3 * (2 if method.startswith("supsup") else 4)


def test_equal_seeds_agree_and_different_seeds_differ_in_everything_drawn(tmp_path):
    first = run(short(), tmp_path / "a")
    again = run(short(), tmp_path / "b")
    other = run(short(seed=1), tmp_path / "a")
    assert outcome(first) == outcome(again)
    assert first["class_order"] != other["class_order"]
    assert set(first["zero_forgetting"]["digests"].values()).isdisjoint(other["zero_forgetting"]["digests"].values())


def test_class_order_can_be_fixed_apart_from_the_seed(tmp_path):
    by_seed = [run(short(seed=seed, class_order_seed=7), tmp_path)["class_order"] for seed in (0, 1)]
    assert by_seed[0] == by_seed[1]
    listed = run(short(seed=2, class_order="9,8,7,6,5,4"), tmp_path)["class_order"]
    assert listed == [[9, 8], [7, 6], [5, 4]]
    natural = run(short(seed=3, class_order="natural"), tmp_path)["class_order"]
    assert natural == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_finished_run_is_only_read(tmp_path):
    record = run(short(), tmp_path)
    results = tmp_path / "split-digits/exssnet+kkt/seed-0/results.json"
    before = results.stat().st_mtime_ns
    assert run(short(), tmp_path) == record
    assert results.stat().st_mtime_ns == before


def test_a_folder_of_another_configuration_is_refused_and_left_alone(tmp_path):
    run(short(), tmp_path)
    with pytest.raises(RunError, match=r"another configuration \(different: density, lr\)"):
        run(short(density=0.2, lr=0.02), tmp_path)


WRITER = """
import sys
from pathlib import Path
from exssnet.experiments.run_folder import RunFolder
from tests.experiments.short_runs import short
with RunFolder(Path(sys.argv[1]), short()).writing():
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_cannot_write_the_same_run_until_the_first_is_gone(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    ) as writer:  # fmt: skip
        assert writer.stdout.readline() == "writing\n"
        with pytest.raises(RunError, match="is in use by another process: wait until it ends"):
            run(short(), tmp_path)
        writer.kill()
    run(short(), tmp_path)
    files = {file.name for file in (tmp_path / "split-digits/exssnet+kkt/seed-0").iterdir()}
    assert files == {"config.yaml", "log.jsonl", "results.json"}


WINDOWS = """
import os, sys
from pathlib import Path
sys.modules["fcntl"] = None
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "sched_getaffinity"):
    delattr(os, name)
from exssnet.experiments.run_folder import RunFolder
from tests.experiments.short_runs import short
folder = RunFolder(Path(sys.argv[1]), short())
with folder.writing():
    folder.log(event="epoch")
"""


def test_a_run_is_written_without_what_only_unix_has(tmp_path):
    subprocess.run([sys.executable, "-c", WINDOWS, tmp_path], check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "split-digits/exssnet+kkt/seed-0/log.jsonl").read_bytes() == b'{"event": "epoch"}\n'


def test_a_run_that_fails_on_its_way_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match="the loss became"):
        run(short(weight_lr=1e30), tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["exssnet", "ssnet"])
def test_evaluating_the_ends_only_gives_the_same_diagonal_and_last_row(tmp_path, method):
    full = run(short(method), tmp_path / "full")["accuracy_matrix"]
    record = run(short(method, evaluate="ends"), tmp_path / "ends")
    ends = record["accuracy_matrix"]
    assert ends[-1] == full[-1]
    assert [ends[i][i] for i in range(3)] == [full[i][i] for i in range(3)]
    assert ends[1][0] is None
    drop = pytest.approx((full[0][0] - full[2][0] + full[1][1] - full[2][1]) / 2)
    assert record["forgetting_by_definition"]["avalanche"] == drop
    assert record["forgetting"] == (0 if method == "exssnet" else None)  # what is not proved is not known


PROMISED = {"exssnet": True, "packnet": True, "ssnet": False, "er": False}


@pytest.mark.parametrize("method", PROMISED)
def test_tasks_that_cannot_have_changed_are_measured_when_learned_and_at_the_end(tmp_path, monkeypatch, method):
    measured, accuracy = [], _Run._accuracy

    def counted(self, index):
        measured.append(index)
        return accuracy(self, index)

    monkeypatch.setattr(_Run, "_accuracy", counted)
    few = {"epochs": 3, "tasks": 3}
    record = run(resolve("split-digits", method, 0, **few), tmp_path)
    every_time = [0, 0, 1, 0, 1, 2]
    assert measured == ([0, 1, 0, 1, 2] if PROMISED[method] else every_time)
    assert record["accuracy_measured"] == [[True, None, None], [not PROMISED[method], True, None], [True] * 3]
    log = (tmp_path / f"split-digits/{method}/seed-0/log.jsonl").read_text().splitlines()
    carried = [json.loads(line)["carried_over"] for line in log if '"event": "task"' in line]
    assert carried == [0, 1 if PROMISED[method] else 0, 0]
    measured.clear()
    monkeypatch.setattr(parse(method)[0], "exclusive", False)  # it promises nothing
    again = run(resolve("split-digits", method, 0, **few), tmp_path / "again")
    assert again["accuracy_matrix"] == record["accuracy_matrix"]
    assert again["accuracy_measured"] == [[True, None, None], [True, True, None], [True] * 3]
    assert measured == every_time


def test_what_is_recorded_is_the_share_of_right_answers_on_the_test_split(tmp_path):
    config = resolve("split-digits", "naive", 0, epochs=2, tasks=2, threads=1)
    matrix = run(config, tmp_path)["accuracy_matrix"]
    stream, method = prepare(config)
    for index in range(2):
        Trainer(method, 0, train_settings(config)).learn(stream[index])
        for earlier in range(index + 1):
            test = stream[earlier].test
            x, y = test.batch(torch.arange(len(test)))
            right = int((method.logits(x, f"task{earlier + 1}").argmax(1) == y).sum())
            assert matrix[index][earlier] == pytest.approx(100 * right / len(y))


@pytest.mark.parametrize(
    ("method", "changes", "second"), [("exssnet", {"evaluate": "ends"}, [None, True]), ("multitask", {}, [None, None])]
)
def test_what_was_not_measured_is_neither_measured_nor_carried_over(tmp_path, method, changes, second):
    record = run(resolve("split-digits", method, 0, epochs=2, tasks=3, **changes), tmp_path)
    assert record["accuracy_measured"] == [[second[1], None, None], [*second, None], [True] * 3]
    assert [[one is None for one in row] for row in record["accuracy_measured"]] == [
        [one is None for one in row] for row in record["accuracy_matrix"]
    ]


def test_validation_and_best_selection_leave_the_test_split_alone(tmp_path):
    record = run(short(validation=0.2, select="best"), tmp_path)
    plain = run(short(), tmp_path / "plain")
    assert record["data_digests"] == plain["data_digests"]
    log = (tmp_path / "split-digits/exssnet+kkt/seed-0/log.jsonl").read_text().splitlines()
    assert all(0 <= json.loads(line)["validation"] <= 100 for line in log if '"epoch"' in line)
    with pytest.raises(InputError, match="needs a validation part"):
        run(short(select="best", seed=5), tmp_path)


def test_a_run_that_another_process_finished_meanwhile_is_read_and_not_touched(tmp_path, monkeypatch):
    real = prepare
    rival = {}

    def slow(*arguments):
        if not rival:
            rival["running"] = True
            rival["record"] = run(short(), tmp_path)
        return real(*arguments)

    monkeypatch.setattr("exssnet.experiments.run.prepare", slow)
    assert run(short(), tmp_path) == rival["record"]
    log = tmp_path / "split-digits/exssnet+kkt/seed-0/log.jsonl"
    assert len(log.read_text().splitlines()) == 3 * 5


def test_runs_that_are_told_to_stop_end_at_their_next_step(tmp_path):
    import threading

    from exssnet.experiments.together import Stoppable

    stop = threading.Event()
    listener = Stoppable(Listener(), stop)
    run(short(), tmp_path / "a", listener)
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        run(short(), tmp_path / "b", listener)


def test_an_error_of_another_kind_is_not_called_a_full_disk(tmp_path, monkeypatch):
    from exssnet.data.tensors import TensorData

    def missing(*_):
        raise FileNotFoundError(2, "No such file or directory", "ptxas")

    monkeypatch.setattr(TensorData, "batch", missing)
    with pytest.raises(FileNotFoundError, match="ptxas"):
        run(short(), tmp_path)


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"No space left on device\): free disk space"):
        run(short(), tmp_path)


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr(Trainer, "learn", fail)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        run(resolve("split-digits", "exssnet", 0), tmp_path)
