"""Optimizers and schedules of the learning rate, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet.engine.kernels import has_kernels
from exssnet.errors import InputError, unknown

OptimizerFactory = Callable[[list[Tensor], float], Optimizer]
Schedule = Callable[[float, int, int], float]  # of the phase's rate, the epoch (from 0) and how many there are


def _adam(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Optimizer:
    """Decay, if any, is added to the gradient."""
    if not weight_decay:
        return _adamw(parameters, lr, 0.0)
    return torch.optim.Adam(
        parameters, _rate(parameters, lr), weight_decay=weight_decay, fused=True, capturable=parameters[0].is_cuda
    )


def _adamw(parameters: list[Tensor], lr: float, weight_decay: float = 0.01) -> Optimizer:
    """Decay is apart from the gradient: p shrinks by lr · decay in every step."""
    rate = _rate(parameters, lr)
    if isinstance(rate, Tensor) and all(has_kernels(parameter, torch.float32) for parameter in parameters):
        from exssnet.engine.cuda.adam_triton import LongAdam

        return LongAdam(parameters, rate, weight_decay)
    return torch.optim.AdamW(parameters, rate, weight_decay=weight_decay, fused=True, capturable=parameters[0].is_cuda)


def _sgd(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Optimizer:
    return torch.optim.SGD(
        parameters, _rate(parameters, lr), momentum=0.9, weight_decay=weight_decay, fused=parameters[0].is_cuda
    )


def _rate(parameters: list[Tensor], lr: float) -> float | Tensor:
    """On a GPU the rate is a tensor there: a captured step reads it anew at every replay."""
    return torch.tensor(lr, device=parameters[0].device) if parameters[0].is_cuda else lr


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adam": _adam, "adamw": _adamw, "sgd": _sgd}


def optimizer_factory(optimizer: str | OptimizerFactory, weight_decay: float | None = None) -> OptimizerFactory:
    """A named optimizer's factory, with its own usual decay unless one is given; a factory is passed through."""
    if callable(optimizer):
        if weight_decay is not None:
            raise InputError("weight_decay is for an optimizer by name: one of your own brings its decay along")
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    if weight_decay is None:
        return OPTIMIZERS[optimizer]
    if not isinstance(weight_decay, int | float) or not 0 <= weight_decay < math.inf:
        raise InputError(f"weight_decay is {weight_decay}: it must be a number, at least 0")
    return partial(OPTIMIZERS[optimizer], weight_decay=weight_decay)


def cosine(lr: float, epoch: int, epochs: int) -> float:
    """Half a cosine from `lr` towards zero."""
    return lr * (1 + math.cos(math.pi * epoch / epochs)) / 2


def published(lr: float, epoch: int, epochs: int) -> float:
    """A cosine, of which a tenth is left after the first 12 epochs, and after every 11 that follow.

    The paper's code shows `ReduceLROnPlateau` accuracies and has it wait for a lower one. The first is taken to be the
    lowest here.
    """
    return cosine(lr, epoch, epochs) * 0.1 ** (max(epoch - 1, 0) // 11)


def constant(lr: float, epoch: int, epochs: int) -> float:
    """The same rate throughout."""
    return lr


SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "constant": constant, "published": published}


def schedule_of(name: str) -> Schedule:
    """A schedule by name."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]
