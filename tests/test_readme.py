"""The README's commands and code give what it says they give."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")

# What is measured may differ on another CPU, which rounds otherwise: accuracies and overlaps by points of a percent,
# counts of trained weights and sizes by a share. Everything else is compared as it stands.
POINTS, SHARE = 2.0, 0.05
TOKEN = re.compile(r"\d{4}-\d\d-\d\d|\d[\d,]*(?:\.\d+)?|[^\s\d]+")
DATE, DECIMAL, LARGE = (re.compile(pattern) for pattern in (r"\d{4}-\d\d-\d\d", r"[\d,]+\.\d+", r"\d+(,\d{3})+"))


def block(after: str, language: str = "") -> str:
    found = re.search(rf"```{language}\n(.*?)```", README[README.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def assert_alike(found: str, shown: str) -> None:
    """The same lines and words; dates are dates, and measured numbers are near."""
    assert found.count("\n") == shown.count("\n"), found
    for line, wanted in zip(found.splitlines(), shown.splitlines(), strict=True):
        tokens, others = TOKEN.findall(line), TOKEN.findall(wanted)
        assert len(tokens) == len(others), (line, wanted)
        for token, other, unit in zip(tokens, others, [*others[1:], ""], strict=True):
            assert alike(token, other, unit), f"{token} for {other} in: {line}"


def alike(token: str, other: str, unit: str = "") -> bool:
    for kind in (DATE, DECIMAL, LARGE):
        if kind.fullmatch(token) and kind.fullmatch(other):
            if kind is DATE:
                return True
            one, two = (float(text.replace(",", "")) for text in (token, other))
            return abs(one - two) <= (SHARE * two if kind is LARGE or unit == "kB" else POINTS)
    return token == other


def without_time(text: str) -> str:
    return re.sub(r"[\d.]+ s on cpu \(\w+, 1 thread\)", "TIME", text)


@pytest.mark.parametrize(
    ("found", "shown", "same"),
    [
        ("97.8 %", "96.1 %", True),
        ("97.8 %", "95.1 %", False),
        ("28.6 kB", "27.6 kB", True),
        ("28.6 kB", "26.6 kB", False),
        ("4,920 trained", "4,900 trained", True),
        ("4,920 trained", "3,562 trained", False),
        ("4920", "4921", False),
        ("5 classes", "6 classes", False),
        ("5 classes", "5.0 classes", False),
        ("2026-11-15", "2027-01-01", True),
        ("low  lender", "low lender", True),
        ("low", "high", False),
        ("a\nb", "a", False),
    ],
)
def test_numbers_that_are_measured_may_differ_a_little_and_nothing_else(found, shown, same):
    if same:
        assert_alike(found, shown)
    else:
        with pytest.raises(AssertionError):
            assert_alike(found, shown)


def test_the_python_example_prints_what_the_readme_shows(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", block("pip install", "python")], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == block("It prints:")


def test_the_first_command_prints_what_the_readme_shows(exssnet, tmp_path):
    done = exssnet("run", "split-digits", "--method", "exssnet+kkt", cwd=tmp_path)
    shown = block("\nprints\n")
    assert "TIME" in without_time(shown)
    assert_alike(without_time(done.stdout), without_time(shown))
    command = re.search(
        r"^run: .*\n\t\$\(BIN\)/exssnet (.*)$", (Path(__file__).parents[1] / "Makefile").read_text(), re.M
    )
    assert command[1] == "run split-digits --method exssnet+kkt"


def test_the_model_directory_prints_what_the_readme_shows(tmp_path):
    commands = block("## A model on disk")
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert_alike(lines[-1] + "\n", block("`verify` prints"))
    heading = next(number for number, line in enumerate(lines) if line.startswith("input "))
    told = block("`predict` prints").splitlines()
    assert lines[heading].split() == told[0].split()
    for line, wanted in zip(lines[heading + 1 : -1], told[1:], strict=True):
        name, task, _, label = line.split()[:4]
        assert name == wanted.split()[0]
        true = {"high.npz:0": "5", "high.npz:1": "6"}[name]
        assert (task, label) in (("unknown", "–"), ("high", true))  # never another task as if it were certain


def test_the_readme_fits_and_names_no_package_registry():
    assert len(README.splitlines()) <= 120
    assert "py" + "pi" not in README.lower()
