"""Commands that the user stops with Ctrl-C, and what is said while they go on."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forks import PROGRESS, Done, Forks

from exssnet.cli import progress as terminal_progress
from exssnet.cli.progress import Epochs, Lines
from exssnet.train import EpochReport

RUN = ("run", "split-digits", "--tasks", "2", "--mask-epochs", "1", "--weight-epochs")
FOLDER = Path("runs/split-digits/exssnet/seed-0")


def wait_until(when: Callable[[], bool]) -> None:
    patience = time.monotonic() + 120
    while not when():
        assert time.monotonic() < patience
        time.sleep(0.01)


def stopped(exssnet: Forks, cwd: Path, when: Callable[[], bool], *arguments: object) -> Done:
    """Ctrl-C as soon as something is so."""
    process = exssnet.start(*arguments, cwd=cwd)
    wait_until(when)
    os.kill(process, signal.SIGINT)
    done = exssnet.wait(process)
    assert (done.returncode, done.stdout) == (130, "")
    return done


def test_a_run_that_is_stopped_says_what_is_kept_and_goes_on(exssnet: Forks, tmp_path: Path):
    def logged() -> bool:
        return (tmp_path / FOLDER / "log.jsonl").exists()

    done = stopped(exssnet, tmp_path, logged, *RUN, 10**6, "--checkpoint-seconds", 10**6)
    assert done.said == f"exssnet: stopped; {FOLDER} has no checkpoint: run the same command to start again\n"

    def kept() -> bool:
        return (tmp_path / FOLDER / "checkpoint.safetensors").exists()

    done = stopped(exssnet, tmp_path, kept, *RUN, 10**6, "--checkpoint-seconds", 0)
    assert re.fullmatch(
        rf"exssnet: stopped; {FOLDER} has a checkpoint of \d+ s ago: run the same command to continue\n",
        done.said,
    )


def test_of_several_runs_that_are_stopped_it_is_said_how_many_are_finished(exssnet: Forks, tmp_path: Path):
    second = Path("runs/split-digits/ssnet/seed-0")

    def under_way() -> bool:
        return (tmp_path / second / "checkpoint.safetensors").exists()

    both = (*RUN, 60, "--method", "exssnet,ssnet", "--checkpoint-seconds", 0)
    process = exssnet.start(*both, cwd=tmp_path)
    wait_until(under_way)
    os.kill(process, signal.SIGINT)
    done = exssnet.wait(process)
    assert done.returncode == 130
    assert f"run: {FOLDER}\n" in done.stdout  # the first one is told, the second one is not
    assert re.fullmatch(
        rf"exssnet: stopped; 1 of 2 runs are finished; {second} has a checkpoint of \d+ s ago: "
        r"run the same command to continue\n",
        done.said,
    )
    assert exssnet(*both, cwd=tmp_path).stdout.count("run: ") == 2


def test_a_command_that_has_nothing_to_keep_says_that_it_was_stopped(exssnet: Forks, tmp_path: Path):
    os.mkfifo(tmp_path / "wait")
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys\n"
        "from exssnet.cli import main\n"
        "@main.app.command()\n"
        "def wait():\n"
        "    open('begun', 'w').close()\n"
        "    open('wait')\n"
        "main.main()\n"
    )
    process = exssnet.start("wait", program=slow, cwd=tmp_path)
    wait_until((tmp_path / "begun").exists)
    os.kill(process, signal.SIGINT)
    done = exssnet.wait(process)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "exssnet: stopped\n")


# --- progress ---------------------------------------------------------------------------------------------------


def test_progress_is_told_where_nobody_looks_at_a_terminal(exssnet: Forks, tmp_path: Path):
    done = exssnet(*RUN, 1, "--seeds", "0,1", cwd=tmp_path)
    lines = done.stderr.splitlines(keepends=True)
    names = [line.partition(":")[0] for line in lines if PROGRESS.fullmatch(line)]
    assert list(dict.fromkeys(names)) == ["exssnet seed 0", "exssnet seed 1"]
    assert lines[0] == "exssnet seed 0: task 1/2 mask 1/1, 0 % done\n"
    assert done.said == ""
    done = exssnet(*RUN, 1, "--seeds", "2", "--json", cwd=tmp_path)
    assert done.stderr == ""


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when the test says so."""
    now = [100.0]
    monkeypatch.setattr(terminal_progress.time, "monotonic", lambda: now[0])
    return now


def told(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def epoch(number: int, of: int, validation: float | None = None) -> EpochReport:
    return EpochReport("a", "mask", number, of, 0.25, 50.0, validation, 0.01, 1.0)


def test_a_line_comes_at_once_and_then_one_every_five_seconds_with_what_is_left(clock, capsys):
    epochs = Epochs(Lines("learning a"))
    epochs.epochs_planned(40)
    epochs.phase_started("mask", 20, 0)
    assert told(capsys) == ["learning a: mask 1/20, 0 % done"]
    for number in range(1, 11):
        clock[0] += 1
        epochs.progress(0.5)
        epochs.epoch_ended(epoch(number, 20, 75.0))
    assert told(capsys) == [
        "learning a: mask 5/20 loss 0.250 acc 50.0 % held out 75.0 %, 11 % done, 39 s left",
        "learning a: mask 10/20 loss 0.250 acc 50.0 % held out 75.0 %, 24 % done, 32 s left",
    ]
    epochs.phase_started("weights", 20, 0)
    clock[0] += 7200
    epochs.epoch_ended(epoch(1, 20))
    assert told(capsys) == ["learning a: weights 2/20 loss 0.250 acc 50.0 %, 52 % done, 1 h 49 min left"]


def test_a_run_counts_its_tasks_and_a_resumed_one_what_it_has_done_before(clock, capsys):
    epochs = Epochs(Lines("exssnet seed 0"), per_task=20, tasks=5)
    epochs.task_started(2, "task3")
    epochs.phase_started("mask", 10, 10)
    epochs.phase_started("weights", 10, 4)
    clock[0] += 60
    epochs.epoch_ended(epoch(5, 10))
    assert told(capsys) == [
        "exssnet seed 0: task 3/5 mask 10/10, 50 % done",
        "exssnet seed 0: task 3/5 weights 6/10 loss 0.250 acc 50.0 %, 55 % done, 9 min left",
    ]


def test_a_closed_standard_error_does_not_stop_what_learns(clock, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w")
    monkeypatch.setattr("sys.stderr", broken)
    Lines("a").show(1.0, "mask 1/2")
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):  # it could not be written, and still cannot
        broken.close()
