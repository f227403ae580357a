"""The README's commands and code give what it says they give."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def block(after: str, language: str = "") -> str:
    found = re.search(rf"```{language}\n(.*?)```", README[README.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def test_the_python_example_prints_what_the_readme_shows(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", block("## Python", "python")], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == block("It prints:")


def test_the_first_command_prints_what_the_readme_shows(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "exssnet", "run", "split-digits", "--method", "exssnet+kkt"], capture_output=True,
        text=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )  # fmt: skip

    def lines(text: str) -> list[str]:
        timed = re.sub(r"[\d.]+ s on cpu \(.*?\)", "", text)
        return [line.rstrip() for line in timed.splitlines() if not line.startswith(".venv")]

    assert lines(done.stdout) == lines(block("`make run` prints:"))


def test_the_model_directory_prints_what_the_readme_shows(tmp_path):
    commands = block("## A model that keeps learning, on disk")
    shown = block("The last two print")
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert _apart_from_numbers(lines[-5:]) == _apart_from_numbers(shown.splitlines())
    assert "every byte as written" in lines[-1]
    heading = next(number for number, line in enumerate(lines) if line.startswith("input "))
    told = block("`predict` begins with").splitlines()
    assert lines[heading].split() == told[0].split()
    for line, wanted in zip(lines[heading + 1 :], told[1:], strict=False):
        name, task, _, label = line.split()[:4]
        assert name == wanted.split()[0]
        true = {"high.npz:0": "5", "high.npz:1": "6"}[name]
        assert (task, label) in (("unknown", "–"), ("high", true))  # never another task as if it were certain


def _apart_from_numbers(lines):
    """Accuracies, sizes and dates may differ with the machine and the day; words and columns may not."""
    return [re.sub(r"[\d.,–-]+", "#", " ".join(line.split())) for line in lines]
