"""The programs that made the records: all start, and those that can be made small run to their record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(
    f"{folder}/{file.name}" for folder in ("benchmarks", "results") for file in (ROOT / folder).glob("*.py")
)
SMALL = {
    "benchmarks/transfer.py": "--benchmark split-digits --mask-epochs 1 --weight-epochs 1 --seeds 1",
    "results/attention.py": "split-digits --epochs 1 --device cpu",
    "results/shared_outputs.py": "split-digits --set epochs=1 --set device=cpu --set schedule=published",
    "results/tune_baselines.py": "split-digits --method lwf --grid strength=1,3 --grid epochs=1 --grid device=cpu",
    "results/unmasked.py": "split-digits --epochs 1 --device cpu",
}


def started(program, *arguments):
    return subprocess.run([sys.executable, str(ROOT / program), *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_what_it_does(program):
    found = started(program, "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"usage: {Path(program).name}")


@pytest.mark.parametrize("program", SMALL)
def test_a_program_runs_to_its_record(program, tmp_path):
    found = started(program, *SMALL[program].split(), "--json", str(tmp_path / "record.json"))
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert {"versions", "device"} <= record.keys()
