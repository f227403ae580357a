"""Config files: read as they were written, checked like a new run, and enough to repeat it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.experiments.short_runs import short

from exssnet.errors import RunError
from exssnet.experiments.config import BY_NAME, OF_CLASSES, RunConfig, resolve
from exssnet.experiments.recipes import recipes
from exssnet.experiments.run import run
from exssnet.methods import general, methods

DAMAGE = {
    "device: cpu": "device: cuda",
    "tasks: 3": "tasks: two",
    "density: 0.1": "density: '0.1'",
    "stream: split": "stream: nonsense",
    "select: last": "select: last\nselct: best",
    "benchmark: split-digits": "benchmark: ../../elsewhere",
    "method: exssnet+kkt": "method: ../exssnet",
    "kkt_start: bits": "kkt_begin: bits",
    "seed: 0\nsource": "seed: '0'\nsource",
    "network: lenet-300-100": "network: [",
}


@pytest.mark.parametrize("line", DAMAGE)
def test_a_config_file_is_checked_like_a_new_run(tmp_path, line):
    if "cuda" in DAMAGE[line] and torch.cuda.is_available():
        pytest.skip("not for a machine with a GPU: it has what the file asks for")
    text = short().to_yaml()
    assert line in text
    file = tmp_path / "config.yaml"
    file.write_text(text.replace(line, DAMAGE[line]))
    with pytest.raises(RunError, match=r"config\.yaml") as error:
        RunConfig.read(file)
    assert "\n" not in str(error.value)


def test_a_config_file_reads_as_it_was_written(tmp_path):
    file = tmp_path / "config.yaml"
    configs = [resolve(benchmark, "exssnet", 4) for benchmark in recipes()]
    configs += [short(), short("supsup", density=0.3), resolve("split-cifar100", "exssnet", 4, optimizer="sgd")]
    for config in configs:
        file.write_text(config.to_yaml())
        assert RunConfig.read(file) == config


def test_a_config_file_says_everything_whatever_the_recipe_says_today(tmp_path):
    file = tmp_path / "config.yaml"
    config = resolve("split-cifar100", "exssnet", 0, optimizer="adam")
    file.write_text("".join(line for line in config.to_yaml().splitlines(True) if not line.startswith("weight_decay")))
    assert RunConfig.read(file) == config


def test_a_recipes_decay_goes_with_its_own_optimizer():
    assert resolve("split-cifar100", "exssnet", 0, optimizer="adamw").weight_decay == 0.1
    assert resolve("split-cifar100", "packnet", 0, optimizer="adamw").weight_decay == 0
    assert resolve("split-cifar100", "exssnet", 0).weight_decay == 0.1
    assert resolve("split-cifar100", "exssnet", 0, optimizer="adam").weight_decay is None
    assert resolve("split-cifar100", "exssnet", 0, optimizer="adam", weight_decay=0.2).weight_decay == 0.2


@pytest.mark.parametrize("benchmark", recipes())
def test_an_option_that_repeats_the_recipes_value_changes_nothing(benchmark):
    for method, kind in (methods() if resolve(benchmark, "naive", 3).encoder is not None else general()).items():
        if kind.remembers and benchmark == "split-imagenet":
            continue
        config = resolve(benchmark, method, 3)
        not_options = {*BY_NAME, "code", *(OF_CLASSES if config.stream != "split" else ())}
        options = {name: value for name, value in vars(config).items() if name not in not_options}
        options |= {name: value for name, value in config.settings.items() if name != "kkt"}
        options["epochs"] = kind.settings_type(**config.settings).epochs_per_task  # of all phases together
        for name, value in options.items():
            assert resolve(benchmark, method, 3, **{name: value}) == config, f"{method} --{name} {value}"


def test_the_config_file_repeats_the_run(tmp_path):
    first = run(short(), tmp_path / "a")
    config = tmp_path / "a/split-digits/exssnet+kkt/seed-0/config.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "exssnet", "run", "--config", str(config), "--out", str(tmp_path / "b"), "--json"],
        check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    again = json.loads(done.stdout)
    assert again["accuracy_matrix"] == first["accuracy_matrix"]
    assert again["zero_forgetting"] == first["zero_forgetting"]
