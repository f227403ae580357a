"""How many runs share a GPU, and what is refused; as a machine with a GPU would answer, so no GPU is needed."""

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from exssnet.errors import InputError
from exssnet.experiments.config import resolve
from exssnet.experiments.together import MOST, how_many


@pytest.fixture
def gpu(monkeypatch):
    """One CUDA device that knows bf16, and Triton."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("exssnet.engine.has_triton", lambda: True)
    return monkeypatch


def plans(count, **changes):
    return [resolve("split-digits", "exssnet", seed, **changes) for seed in range(count)]


@pytest.mark.parametrize(
    ("count", "wanted", "found"), [(1, "auto", 1), (3, "auto", 3), (20, "auto", 8), (20, "12", 12)]
)
def test_runs_at_a_time_on_a_gpu(gpu, count, wanted, found):
    assert how_many(wanted, plans(count)) == found


def test_too_many_runs_at_a_time_are_refused(gpu):
    with pytest.raises(InputError, match=f"--together {MOST + 1} is too many: give at most {MOST}"):
        how_many(str(MOST + 1), plans(2))


def test_runs_that_read_from_disk_are_not_put_together(gpu):
    lazy = [replace(plan, benchmark="split-imagenet", source="imagenet") for plan in plans(2)]
    assert how_many("auto", lazy) == 1
    with pytest.raises(InputError, match="--together 2 cannot be used with split-imagenet"):
        how_many("2", lazy)


def test_runs_that_train_an_encoder_are_not_put_together(gpu):
    large = [resolve("webnlp-s2", "fine-tune", seed, encoder="/none") for seed in range(2)]
    assert how_many("auto", [*plans(1), *large]) == 1
    with pytest.raises(InputError, match="together 2: fine-tune trains a whole encoder"):
        how_many("2", large)


def test_a_gpu_without_bf16_computes_in_fp32_and_says_so_if_asked_for_more(gpu):
    gpu.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert plans(1)[0].precision == "fp32"
    with pytest.raises(InputError, match="precision bf16 is not supported by cuda: use fp32"):
        plans(1, precision="bf16")


def test_without_triton_nothing_is_compiled_and_asking_for_it_is_refused(gpu):
    gpu.setattr("exssnet.engine.has_triton", lambda: False)
    assert plans(1)[0].compile == "off"
    with pytest.raises(InputError, match="compile on needs Triton, which is not installed"):
        plans(1, compile="on")


def test_a_device_that_is_not_there_is_refused(gpu):
    with pytest.raises(InputError, match="device 'cuda:1' does not exist: 1 CUDA devices were found"):
        plans(1, device="cuda:1")


@pytest.mark.parametrize(("given", "found"), [(None, "32"), ("4", "4")])
def test_a_connection_for_every_run_is_asked_for_before_cuda_starts(gpu, given, found):
    """The number is read once, when CUDA starts; to count the devices may start it."""
    gpu.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": given} if given else {})
    seen = []

    def available():
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return True

    gpu.setattr(torch.cuda, "is_available", available)
    plans(1)
    assert seen == [found]
