"""Output that cannot be written, terminals that cannot show every sign, and names that look like commands to one."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.experiments.short_runs import short
from tests.forks import Forks

SMALL = ("--network", "lenet-300-100", "--width", "0.1", "--epochs", "2")
ODD = "[red]été–日本"  # would be red, or gone, where it is obeyed
FILE = "\x1b[31m\x9b1m\u202e.npz"  # the second is the same command in one sign
FULL = "No space left on device"

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@pytest.fixture(scope="module")
def model(exssnet: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one task, whose labels have odd names."""
    folder = tmp_path_factory.mktemp("output")
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    np.savez(folder / "a.npz", x=x, y=np.array([ODD, "[/bold]"])[(x[:, 0] > 0).astype(int)])
    done = exssnet("learn", folder / "m", "--task", "[bold]", "--data", folder / "a.npz", *SMALL)
    assert done.returncode == 0, done.stderr
    (folder / FILE).write_bytes((folder / "a.npz").read_bytes())
    return folder


def real(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user types it after `exssnet`, in a process that starts from nothing."""
    script = f'exssnet() {{ {sys.executable} -m exssnet "$@"; }}; exssnet {command}'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, errors="surrogateescape", cwd=cwd,
        env=os.environ | environment,
    )  # fmt: skip


# --- output that cannot be written -----------------------------------------------------------------------------


@needs_full
def test_what_is_stored_is_said_where_the_output_cannot_be_written_and_the_exit_code_is_3(exssnet: Forks, model: Path):
    data = ("--data", "a.npz", "--epochs", "2")
    for arguments, kept in [
        (("learn", "m", "--task", "b", *data), "task 'b' is stored in m"),
        (("learn", "m", "--task", "c", *data, "--json"), "task 'c' is stored in m"),
        (("rename", "m", "--task", "c", "--to", "d"), "'c' is now 'd'"),
        (("export", "m", "--task", "b", "--out", "b.safetensors"), "b.safetensors is written"),
        (("export", "m", "--task", "b", "--out", "other", "--format", "model"), "other is written"),
        (("remove", "m", "--task", "d"), "'d' is removed"),
        (("rollback", "m"), "undone: remove d"),
        (("remove", "m", "--task", "b"), "'b' is removed"),
        (("import", "m", "--from", "other", "--task", "b"), "'b' is imported"),
    ]:
        done = exssnet(*arguments, cwd=model, stdout="/dev/full")
        assert (done.returncode, done.said) == (
            3, f"exssnet: {kept}, but the output could not be written: {FULL}\n",
        ), arguments  # fmt: skip
    tasks = json.loads(exssnet("tasks", "m", "--json", cwd=model).stdout)
    assert [task["name"] for task in tasks] == ["[bold]", "d", "b"]
    for name in ("d", "b"):
        exssnet("remove", "m", "--task", name, cwd=model)


@needs_full
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_run_whose_output_cannot_be_written_is_finished(exssnet: Forks, tmp_path: Path, form):
    few = ("--mask-epochs", "1", "--weight-epochs", "1", "--tasks", "2", *form)
    done = exssnet("run", "split-digits", *few, cwd=tmp_path, stdout="/dev/full")
    kept = "all records are in runs" if form else "the record is in runs/split-digits/exssnet/seed-0"
    assert (done.returncode, done.said) == (3, f"exssnet: {kept}, but the output could not be written: {FULL}\n")
    assert (tmp_path / "runs/split-digits/exssnet/seed-0/results.json").exists()


@needs_full
@pytest.mark.parametrize("command", ["--version", "run --help", "list methods", "tasks m", "show m", "verify m --json"])
def test_a_full_disk_is_one_line_and_a_reader_that_has_enough_none(exssnet: Forks, model: Path, command: str):
    done = exssnet(*command.split(), cwd=model, stdout="/dev/full")
    assert (done.returncode, done.stderr) == (3, f"exssnet: the output could not be written: {FULL}\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = exssnet(*command.split(), cwd=model, stdout=f"/proc/{os.getpid()}/fd/{writer}")
    os.close(writer)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_pipe_to_head_is_silent(model: Path):
    for command in ("tasks m", "list methods"):
        done = real(f"{command} | head -n 1", model)
        assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.slow
def test_closed_streams_are_no_traceback_and_nothing_else_is_written_to_them(exssnet: Forks, model: Path):
    for done in (exssnet("tasks", "m", cwd=model, closed=[1]), real("tasks m >&-", model)):
        assert (done.returncode, done.stderr) == (3, "exssnet: the output could not be written: Bad file descriptor\n")
    for done in (exssnet("tasks", "no", cwd=model, closed=[2]), real("tasks no 2>&-", model)):
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    before = {file: file.read_bytes() for file in (model / "m").rglob("*") if file.is_file()}
    learn = ("learn", "m", "--task", "x", "--data", "a.npz", "--epochs", "2")
    done = exssnet(*learn, cwd=model, closed=[0, 1, 2])
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    after = {file: file.read_bytes() for file in (model / "m").rglob("*") if file.is_file()}
    written = [content for file, content in after.items() if before.get(file) != content]
    assert not any(b"learned x" in content or b"learning x" in content for content in written)
    for command in (("verify", "m"), ("remove", "m", "--task", "x")):
        assert exssnet(*command, cwd=model).returncode == 0


# --- terminals that cannot show every sign ----------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_every_table_can_be_shown_in_every_encoding(exssnet: Forks, model: Path, encoding: str):
    predict = ("predict", "m", "a.npz", "--task", "[bold]")
    tasks, answers, found = (
        exssnet(*command, cwd=model, encoding=encoding)
        for command in (("tasks", "m"), predict, (*predict, "--json"))
    )  # fmt: skip
    for done in (tasks, answers, found):
        assert (done.returncode, done.stderr) == (0, "")
    text = (tasks.stdout + answers.stdout).encode(errors="surrogateescape").decode(encoding)
    assert text.splitlines()[1].split()[3] == ("–" if encoding == "utf-8" else "-")  # it has no lender
    shown = {"utf-8": "été–日本", "latin-1": r"été-\u65e5\u672c", "ascii": r"\xe9t\xe9-\u65e5\u672c"}
    assert re.search(r"\[red\]\S+", text)[0] == "[red]" + shown[encoding]
    # JSON is the same everywhere
    assert {answer["label"] for answer in json.loads(found.stdout)} == {ODD, "[/bold]"}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_what_the_environment_says_of_the_terminal_is_enough(model: Path, environment: dict[str, str]):
    done = real("tasks m && exssnet --help && exssnet tasks é", model, **environment)
    assert (done.returncode, done.stdout.count("\n") > 10) == (2, True)
    assert re.fullmatch(r"exssnet: [^\n]+ is not a model directory[^\n]+\n", done.stderr)


# --- names ------------------------------------------------------------------------------------------------------


def test_a_folder_s_name_is_printed_as_it_is(exssnet: Forks, tmp_path: Path):
    few = ("--mask-epochs", "1", "--weight-epochs", "1", "--tasks", "2")
    for out, shown in (("runs[v1]", "runs[v1]"), ("[red]x[red]", "[red]x[red]"), ("a\x1b[1m", r"a\x1b[1m")):
        done = exssnet("run", "split-digits", *few, "--out", out, cwd=tmp_path)
        assert done.stdout.splitlines()[-1] == f"run: {shown}/split-digits/exssnet/seed-0"
        assert (tmp_path / out / short("exssnet").folder / "results.json").exists()


def test_json_holds_nothing_that_a_terminal_obeys(exssnet: Forks, model: Path):
    printed = exssnet("predict", "m", FILE, "--task", "[bold]", "--json", cwd=model).stdout
    assert printed.removesuffix("\n").isprintable()
    assert json.loads(printed)[0]["name"] == f"{FILE}:0"
    assert exssnet("show", "m", cwd=model).stdout.count("\n") > 10


@pytest.mark.slow
def test_a_terminal_shows_names_and_obeys_none(model: Path):
    printed = in_a_terminal(model, "learn", "m", "--task", "[red]x[red]", "--data", "a.npz", "--epochs", "40")
    assert "learning [red]x[red]" in printed  # the bar
    assert "learned [red]x[red]: 2 classes" in printed
    printed = in_a_terminal(model, "predict", "m", FILE, "--task", "[bold]")
    assert "\x1b[31m" not in printed
    assert r"\x1b[31m\x9b1m\u202e.npz:0" in printed
    assert ODD in printed


def in_a_terminal(cwd: Path, *arguments: str) -> str:
    """What a terminal of 100 columns gets."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "exssnet", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
        env=os.environ | {"COLUMNS": "100", "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            break
        found += part
    os.close(ours)
    assert process.wait() == 0
    return found.decode()


# --- commands that are typed wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--nope"], r"No such option: --nope.* \(see `exssnet run --help`\)"),
        (["rnu"], r"No such command 'rnu'.* \(see `exssnet --help`\)"),
        (["learn"], r"Missing argument 'MODEL'.*"),
        (["run", "--seed\x1b[31ms"], r"No such option: --seed\\x1b\[31ms.*"),
        (["run", "split-digits", "--tasks", "x"], r".*'--tasks'.*'?x'?.*"),
        (["list", "[red]"], r".*\[red\].*"),
    ],
)
def test_what_is_typed_wrong_is_one_line(exssnet: Forks, tmp_path: Path, arguments: list[str], said: str):
    done = exssnet(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"exssnet: {said}\n", done.stderr), done.stderr


def test_no_command_prints_the_help(exssnet: Forks, tmp_path: Path):
    done = exssnet(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert "Usage: exssnet" in done.stdout


def test_a_warning_says_when_little_is_free_and_names_are_never_obeyed(exssnet: Forks, tmp_path: Path):
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    labels = np.array(["[red]a[/blue]", "[31m:smile:"])[(x[:, 0] > 0).astype(int)]
    np.savez(tmp_path / "a.npz", x=x, y=labels)
    first = ("learn", "m", "--task", "[bold]", "--data", "a.npz", "--density", "0.8", *SMALL)
    done = exssnet(*first, cwd=tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(
        r"exssnet: only \d+ % of the weights are free, and new tasks will mostly use trained ones[^\n]*\n", done.said
    )
    assert "[bold]" in exssnet("tasks", "m", cwd=tmp_path).stdout
    printed = exssnet("predict", "m", "a.npz", "--task", "[bold]", cwd=tmp_path).stdout
    assert "[red]a[/blue]" in printed
    assert "[31m:smile:" in printed
