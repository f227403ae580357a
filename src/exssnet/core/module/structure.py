"""A user's module as structure: a copy without numbers, which runs on tensors that are passed in."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from exssnet.core.module.identity import described
from exssnet.errors import InputError


class Structure:
    """A copy of a module that holds no numbers, on the `meta` device. `still`: submodules always in evaluation mode."""

    def __init__(self, module: nn.Module, still: tuple[str, ...] = ()) -> None:
        self.skeleton = _skeleton(module)  # in evaluation mode; not to be changed
        self.unread = _take_out_unread(self.skeleton)
        self.still = still

    def copy(self) -> nn.Module:
        """A module of this structure that the caller may change."""
        return copy.deepcopy(self.skeleton)

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Put a copy into training or evaluation mode."""
        if module.training != training:
            module.train(training)
            for name in self.still:
                module.get_submodule(name).eval()

    def fingerprint(self) -> str | None:
        """The same of structures that compute the same; None where attributes cannot be compared."""
        return described(self.skeleton)

    def bake(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A plain module with these tensors in it, in evaluation mode; tied tensors stay tied."""
        baked = copy.deepcopy(self.skeleton)
        parameters = {
            id(old): nn.Parameter(tensors[name].detach().clone(), old.requires_grad)
            for name, old in baked.named_parameters()
        }
        for name in self.unread:
            owner_name, _, short = name.rpartition(".")
            baked.get_submodule(owner_name)._buffers[short] = torch.empty_like(tensors[name], device="meta")
        buffers = {id(old): tensors[name].clone() for name, old in baked.named_buffers()}
        for owner in baked.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                owner._parameters[name] = parameters[id(parameter)]
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
                owner._buffers[name] = buffers[id(buffer)]
        return baked.eval()


def _take_out_unread(skeleton: nn.Module) -> set[str]:
    """Names of the batch counters that no computation reads: a norm layer with a fixed momentum only counts up.

    Taken out of the skeleton, they cost no step anything and no task a private tensor.
    """
    unread = set()
    for name, part in skeleton.named_modules():
        norm = isinstance(part, nn.modules.batchnorm._NormBase)
        if norm and part.momentum is not None and part.num_batches_tracked is not None:
            unread.add(f"{name}.num_batches_tracked" if name else "num_batches_tracked")
            part.num_batches_tracked = None
    return unread


def _skeleton(module: nn.Module) -> nn.Module:
    """A deep copy with meta tensors, one for each tensor of the module, so that what is tied stays tied."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        skeleton: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"the module cannot be copied ({why}): keep locks, files and results of computations out of its attributes"
        ) from error
    return skeleton.eval()
