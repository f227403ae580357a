"""Benchmarks as data: YAML files in `recipes/`, with a recipe per method. Read without torch.

A file is one benchmark, or several that differ in what `variants` says of each. `own/` has the recipes of streams of a
user's own data.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exssnet.errors import InputError, unknown

if TYPE_CHECKING:
    from exssnet.data import Dataset
    from exssnet.data.tasks import Stream
    from exssnet.encoders import Encoder
    from exssnet.experiments.config import RunConfig


STREAMS = ("split", "permuted", "rotated", "text", "files")


@cache
def recipes() -> dict[str, dict[str, Any]]:
    """Every benchmark's recipe file, by name."""
    import yaml

    folder = resources.files(__package__)
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    found: dict[str, dict[str, Any]] = {}
    for name in files:
        one = yaml.safe_load((folder / name).read_text("utf-8"))
        variants = one.pop("variants", None)
        found |= {name.removesuffix(".yaml"): one} if variants is None else {v: one | variants[v] for v in variants}
    return dict(sorted(found.items()))


def own_recipe(file: Path) -> tuple[str, dict[str, Any]]:
    """The name of a stream of a user's own data, and the recipe for its kind."""
    import yaml

    from exssnet.data.files.stream_file import NAME, read_stream_file

    described = read_stream_file(file)
    name = described.name or file.stem
    if re.fullmatch(NAME, name) is None:
        raise InputError(f"{file}: '{name}' cannot be a stream's name: add `name:` with letters, digits and -")
    if name in recipes():
        raise InputError(f"{file}: {name} is the name of a benchmark: add `name:` with another")
    kind = "text" if described.is_text else "arrays"
    found: dict[str, Any] = yaml.safe_load((resources.files(__package__) / "own" / f"{kind}.yaml").read_text("utf-8"))
    return name, found | {"source": kind, "stream_file": str(file.resolve()), "tasks": len(described.tasks)}


@cache
def encoder_recipes() -> dict[str, dict[str, Any]]:
    """The usual settings of methods that train a text encoder, whatever the texts."""
    import yaml

    found: dict[str, dict[str, Any]] = yaml.safe_load(
        (resources.files(__package__) / "own" / "encoders.yaml").read_text("utf-8")
    )
    return found


def recipe(benchmark: str) -> dict[str, Any]:
    """One benchmark's recipe file."""
    if benchmark not in recipes():
        raise unknown("benchmark", benchmark, recipes())
    return recipes()[benchmark]


def stream(config: RunConfig) -> Stream:
    """Make the tasks of a run."""
    from exssnet import data

    if config.stream in ("text", "files"):
        own_seed = config.encoder is None or (config.encoder.startswith("random") and config.encoder.count(":") < 2)
        return _of_files(
            config.stream_file, config.benchmark, config.encoder, config.seed if own_seed else 0, config.device,
            config.tasks, config.sample, config.validation,
        )  # fmt: skip
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
def _of_files(
    file: str | None, benchmark: str, encoder: str | None, seed: int, device: str, tasks: int, sample: int | None,
    validation: float,
) -> Stream:  # fmt: skip
    """A stream of texts or of own data, once per process: runs of one command share what was read and encoded."""
    from exssnet.data.benchmarks.text import text_stream
    from exssnet.data.files.stream_file import stream_of
    from exssnet.encoders import load

    def loaded() -> Encoder:
        return load(encoder or "random", seed=seed, device=device)

    if file is not None:
        return stream_of(Path(file), loaded, tasks, sample, validation, seed)
    return text_stream(benchmark, loaded(), tasks, sample, validation)


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
