"""The programs that made the records: all start, and those that can be made small run to their record."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(
    str(file.relative_to(ROOT)) for folder in ("benchmarks", "studies") for file in (ROOT / folder).rglob("*.py")
)
SMALL = {
    "benchmarks/fisher.py": "--images 20 --rounds 1",
    "benchmarks/model_learn.py": "--device cpu --small --networks mlp --rounds 1 --epochs 1",
    "benchmarks/step.py": "--device cpu --network resnet18 --batch-size 4 --steps 2 --rounds 1",
    "benchmarks/store.py": "--tasks 2 --rounds 1",
    "benchmarks/text.py": "--small",
    "benchmarks/transfer.py": "--benchmark split-digits --mask-epochs 1 --weight-epochs 1 --seeds 1",
    "studies/hat-attention/attention.py": "split-digits --epochs 1 --device cpu",
    "studies/published-settings/shared_outputs.py": (
        "split-digits --set epochs=1 --set device=cpu --set schedule=published"
    ),
    "studies/tuning/tune_baselines.py": (
        "split-digits --method lwf --grid strength=1,3 --grid epochs=1 --grid device=cpu"
    ),
    "studies/published-settings/unmasked.py": "split-digits --epochs 1 --device cpu",
}
LONG = ("benchmarks/store.py",)  # it learns 16 tasks with a ResNet-18
TAKE_A_BENCHMARK = {name: options for name, options in SMALL.items() if "split-digits" in options}
TAKE_A_BENCHMARK["studies/tuning/tune.py"] = "split-digits --method exssnet --rates 0.01 --decays 0 --out runs"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_what_it_does_also_without_triton(exssnet, program):
    found = exssnet("--help", program=ROOT / program, without="triton")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"usage: {Path(program).name}")


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SMALL]
)
def test_a_program_runs_to_its_record(exssnet, program, tmp_path):
    found = exssnet(*SMALL[program].split(), "--json", tmp_path / "record.json", program=ROOT / program, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert {"versions", "device"} <= record.keys()


def test_every_program_that_takes_a_benchmark_is_known_here(exssnet):
    taking = {
        program for program in PROGRAMS
        if {"benchmark", "--benchmark"} & set(exssnet("--help", program=ROOT / program).stdout.split())
    }  # fmt: skip
    assert taking == set(TAKE_A_BENCHMARK)


@pytest.mark.parametrize("program", TAKE_A_BENCHMARK)
def test_an_unknown_benchmark_is_one_line(exssnet, program, tmp_path):
    arguments = TAKE_A_BENCHMARK[program].replace("split-digits", "split-minst")
    found = exssnet(*arguments.split(), program=ROOT / program, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "exssnet: unknown benchmark 'split-minst': did you mean split-mnist or split-imagenet or split-digits?\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("missing", "said"), [("triton", "its kernels need Triton: pip install triton")])
def test_a_program_that_needs_a_part_says_so_in_one_line(exssnet, missing, said):
    found = exssnet(program=ROOT / "benchmarks/convolution.py", without=missing)
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"convolution.py: {said}\n")
