"""Benchmarks as data: one YAML file each in `recipes/`, with a recipe per method. Read without torch."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from exssnet.errors import InputError, unknown

if TYPE_CHECKING:
    from exssnet.data import Dataset
    from exssnet.data.tasks import Stream
    from exssnet.experiments.config import RunConfig


STREAMS = ("split", "permuted", "rotated")


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """Every benchmark's recipe file, by name."""
    import yaml

    folder = resources.files(__package__)
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): yaml.safe_load((folder / name).read_text("utf-8")) for name in files}


def recipe(benchmark: str) -> dict[str, Any]:
    """One benchmark's recipe file."""
    if benchmark not in recipes():
        raise unknown("benchmark", benchmark, recipes())
    return recipes()[benchmark]


def stream(config: RunConfig) -> Stream:
    """Make the tasks of a run."""
    from exssnet import data

    if config.images is not None:
        if config.source != "imagenet":
            raise InputError(f"--images needs split-imagenet: {config.benchmark} reads {config.source}")
        dataset = data.image_folder(config.images)
    else:
        dataset = _loaded(config.source)
    cut: dict[str, Any] = {
        "validation": config.validation,
        "validation_seed": config.seed,
        "samples_per_class": config.samples_per_class,
    }
    if config.stream == "permuted":
        return data.permuted(dataset, config.tasks, config.seed, **cut)
    if config.stream == "rotated":
        return data.rotated(dataset, config.tasks, **cut)
    return data.split(dataset, config.tasks, class_order(config, dataset.classes), **cut)


@cache
def _loaded(source: str) -> Dataset:
    """Load a data set once per process: the runs of one command share its tensors."""
    from exssnet import data

    return data.load(source)


def class_order(config: RunConfig, classes: int) -> list[int]:
    """The order of classes: by seed, by number, or as listed."""
    import torch

    from exssnet import randomness

    if config.class_order == "natural":
        return list(range(classes))
    if config.class_order == "seed":
        draw = randomness.generator(config.class_order_seed, "class order")
        return [int(label) for label in torch.randperm(classes, generator=draw)]
    try:
        return [int(label) for label in config.class_order.split(",")]
    except ValueError:
        raise InputError(
            f"--class-order is '{config.class_order}': give seed, natural, or a list such as 3,1,0,2"
        ) from None
