"""Optimizers by name, and the schedule: cosine to zero over a phase."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from exssnet.core.kernels import has_kernels
from exssnet.errors import unknown

OptimizerFactory = Callable[[list[Tensor], float], Optimizer]


def _adam(parameters: list[Tensor], lr: float) -> Optimizer:
    rate = _rate(parameters, lr)
    if isinstance(rate, Tensor) and all(has_kernels(parameter, torch.float32) for parameter in parameters):
        from exssnet.train.adam_triton import LongAdam

        return LongAdam(parameters, rate)
    return torch.optim.Adam(parameters, rate, fused=True, capturable=parameters[0].is_cuda)


def _adamw(parameters: list[Tensor], lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, _rate(parameters, lr), fused=True, capturable=parameters[0].is_cuda)


def _sgd(parameters: list[Tensor], lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, _rate(parameters, lr), momentum=0.9, fused=parameters[0].is_cuda)


def _rate(parameters: list[Tensor], lr: float) -> float | Tensor:
    """On a GPU the rate is a tensor there: a captured step reads it anew at every replay."""
    return torch.tensor(lr, device=parameters[0].device) if parameters[0].is_cuda else lr


OPTIMIZERS: dict[str, OptimizerFactory] = {"adam": _adam, "adamw": _adamw, "sgd": _sgd}


def optimizer_factory(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    """A named optimizer's factory; a factory is passed through."""
    if callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    return OPTIMIZERS[optimizer]


def cosine(lr: float, epoch: int, epochs: int) -> float:
    """The rate of an epoch (from 0): half a cosine from `lr` towards zero."""
    return lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
