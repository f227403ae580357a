"""A user's module as it is taken in: without what only says how it runs, and with weights that can be masked."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from exssnet.errors import InputError

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
UNDONE = {  # what computes a layer's weight before every call, and how to have a plain one
    WeightNorm: "torch.nn.utils.remove_weight_norm(layer)",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm(layer)",
    BasePruningMethod: "torch.nn.utils.prune.remove(layer, 'weight')",
}


def accepted(module: object) -> nn.Module:
    """The module itself, or without `torch.compile` and data parallelism; one that cannot be masked is refused."""
    if not isinstance(module, nn.Module):
        raise InputError(f"the module is a {type(module).__name__}: give a torch.nn.Module")
    plain = _unwrapped(module)
    for name, part in plain.named_modules():
        undone = _undone(part)
        if undone is not None:
            raise InputError(
                f"layer '{name}' computes its weight from other tensors, so that there is nothing to mask: call "
                f"{undone} first"
            )
    return plain


def _unwrapped(module: nn.Module) -> nn.Module:
    module = _innermost(module)
    if any(_inside(part) is not None for part in module.modules()):
        module = copy.deepcopy(module)
        for part in list(module.modules()):
            plain = {name: _innermost(child) for name, child in part._modules.items() if child is not None}
            part._modules.update(plain)
    return module


def _innermost(module: nn.Module) -> nn.Module:
    while (inside := _inside(module)) is not None:
        module = inside
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps."""
    if type(module).__name__ == "OptimizedModule":  # to import its class would import the compiler
        return module.get_submodule("_orig_mod")
    return module.module if isinstance(module, PARALLEL) else None


def _undone(part: nn.Module) -> str | None:
    """How a layer gets a plain weight, if it has none."""
    if parametrize.is_parametrized(part) and any(p.requires_grad for p in part.parameters()):
        name = next(iter(part.parametrizations))  # type: ignore[arg-type]
        return f"torch.nn.utils.parametrize.remove_parametrizations(layer, '{name}')"
    hooks = part._forward_pre_hooks.values()
    return next((undone for kind, undone in UNDONE.items() for hook in hooks if isinstance(hook, kind)), None)
