"""What a run is made of: stream, method and engine of a configuration, and the settings of its process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from exssnet import randomness
from exssnet.core.engine import Engine
from exssnet.data.tasks import Outline, Stream
from exssnet.data.text.stream import TextStream
from exssnet.data.text.tokens import TokenStream
from exssnet.engine import choose
from exssnet.errors import InputError
from exssnet.experiments import recipes
from exssnet.experiments.config import RunConfig
from exssnet.methods import Method, parse
from exssnet.models import build, fitting
from exssnet.train import TrainSettings


def prepare(config: RunConfig, engine: Engine | None = None) -> tuple[Stream, Method]:
    """Make stream and method of a configuration on its device; every invalid value is refused here."""
    kind, _ = parse(config.method)
    settings = kind.settings_type(**config.settings)
    train_settings(config)
    engine = engine or engine_of(config)
    engine.prepare()
    stream = recipes.stream(config)
    if kind.trains_encoder:
        assert isinstance(stream, TextStream)  # `resolve` has refused others
        return _on_tokens(config, kind, settings, stream, engine)
    classes = tuple(len(group) for group in stream.class_order)
    examples = sum(len(task.train) for task in stream) if hasattr(settings, "buffer") else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.derive(config.seed, "module"))
        outputs = kind.module_outputs(config.head, classes)
        network = fitting(stream.input_shape) if config.network == "auto" else config.network
        module = build(network, stream.input_shape, outputs, config.width)
    method = kind(module, settings, config.seed, config.head, Outline(classes, examples))
    method.to(config.device)
    method.use(engine)
    return stream, method


def _on_tokens(
    config: RunConfig, kind: type[Method], settings: Any, texts: TextStream, engine: Engine
) -> tuple[Stream, Method]:
    """The same for a method that trains an encoder: it gets tokens, and a copy of the encoder."""
    stream = TokenStream(texts, kind.name)
    module = copy.deepcopy(stream.encoder.model).requires_grad_(True)
    method = kind(module, settings, config.seed, config.head, stream.outline())
    method.to(config.device)
    method.use(engine)
    return stream, method


def engine_of(config: RunConfig) -> Engine:
    """The engine that a configuration asks for."""
    return choose(config.device, config.precision, config.compile, config.batch_size)


def shared_engines() -> Callable[[RunConfig], Engine]:
    """The same, one for all configurations that ask for the same: runs that share it share what is compiled."""
    made: dict[tuple[object, ...], Engine] = {}

    def engine(config: RunConfig) -> Engine:
        key = (config.device, config.precision, config.compile, config.batch_size)
        if key not in made:
            made[key] = engine_of(config)
        return made[key]

    return engine


def train_settings(config: RunConfig) -> TrainSettings:
    """Settings of the training loop."""
    if config.select == "best" and not config.validation:
        raise InputError("--select best needs a validation part: give --validation, for example 0.1")
    return TrainSettings(config.batch_size, config.optimizer, config.select, config.weight_decay, config.schedule)


@contextmanager
def computing(config: RunConfig) -> Iterator[None]:
    """Set device, threads and deterministic algorithms, and restore them afterwards."""
    if config.device != "cpu":
        always_the_same = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        )
        products = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # fp32 means it: no TF32 in products either
        try:
            with torch.cuda.device(config.device), always_the_same:
                yield
        finally:
            torch.set_float32_matmul_precision(products)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
