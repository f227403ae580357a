"""Optimizers and schedules of the learning rate, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet.core.engine import Engine
from exssnet.errors import InputError, unknown

OptimizerFactory = Callable[[list[Tensor], float], Optimizer]
Schedule = Callable[[float, int, int], float]  # of the phase's rate, the epoch (from 0) and how many there are


def _adam(engine: Engine, parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Decay, if any, is added to the gradient."""
    if not weight_decay:
        return engine.adamw(parameters, lr, 0.0)
    return torch.optim.Adam(
        parameters, _rate(engine, parameters, lr), weight_decay=weight_decay, fused=True,
        capturable=parameters[0].is_cuda,
    )  # fmt: skip


def _adamw(engine: Engine, parameters: list[Tensor], lr: float, weight_decay: float = 0.01) -> Optimizer:
    """Decay is not part of the gradient: p shrinks by lr · decay in every step."""
    return engine.adamw(parameters, lr, weight_decay)


def _sgd(engine: Engine, parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Optimizer:
    rate = _rate(engine, parameters, lr)
    return torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=weight_decay, fused=parameters[0].is_cuda)


def _rate(engine: Engine, parameters: list[Tensor], lr: float) -> float | Tensor:
    return engine.rate(lr, parameters[0].device)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": _adam, "adamw": _adamw, "sgd": _sgd}


def optimizer_factory(
    optimizer: str | OptimizerFactory, weight_decay: float | None = None, engine: Engine | None = None
) -> OptimizerFactory:
    """A named optimizer's factory, with its own usual decay unless one is given; a factory is passed through."""
    if callable(optimizer):
        if weight_decay is not None:
            raise InputError("weight_decay is for an optimizer by name: one of your own brings its decay along")
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    named = partial(OPTIMIZERS[optimizer], engine or Engine())
    if weight_decay is None:
        return named
    if not isinstance(weight_decay, int | float) or not 0 <= weight_decay < math.inf:
        raise InputError(f"weight_decay is {weight_decay}: it must be a number, at least 0")
    return partial(named, weight_decay=weight_decay)


def cosine(lr: float, epoch: int, epochs: int) -> float:
    """Half a cosine from `lr` towards zero."""
    return lr * (1 + math.cos(math.pi * epoch / epochs)) / 2


def published(lr: float, epoch: int, epochs: int) -> float:
    """A cosine, of which a tenth is left after the first 12 epochs, and after every 11 that follow.

    The paper's code shows `ReduceLROnPlateau` accuracies and has it wait for a lower one. The first is taken to be the
    lowest here.
    """
    return cosine(lr, epoch, epochs) * 0.1 ** (max(epoch - 1, 0) // 11)


def linear(lr: float, epoch: int, epochs: int) -> float:
    """A straight line from `lr` towards zero."""
    return lr * (1 - epoch / epochs)


def constant(lr: float, epoch: int, epochs: int) -> float:
    """The same rate throughout."""
    return lr


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "linear": linear, "constant": constant, "published": published}


def schedule_of(name: str) -> Schedule:
    """A schedule by name."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]
