"""Which tensors of a module are masked, private or frozen.

Every parameter is exactly one of

* masked: the weights of Linear, convolution and attention layers; shared by all tasks, selected by bits;
* private: what a task keeps a copy of; norm affine parameters, biases and heads, on request;
* frozen: everything else, and whatever the user has set to `requires_grad=False`; shared, never trained.

Buffers follow from use: a buffer that learning a task changes (norm statistics) is that task's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn

from exssnet.core.layout import Layer, Layout
from exssnet.errors import InputError

HEADS = ("shared", "task")
WORDS = ("norm", "bias")

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_WEIGHTED = (nn.Linear, *_CONVOLUTIONS)
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Partition:
    """The three kinds, by name, and the layer that turns features into logits."""

    masked: Layout
    private: tuple[str, ...]
    frozen: tuple[str, ...]
    head: str  # the module's name, for example "head" or "classifier.2"
    head_is_private: bool
    still: tuple[str, ...]  # submodules whose parameters are all frozen by the user: always in evaluation mode


def partition(
    module: nn.Module, private: Collection[str] = (), head: str = "shared", head_layer: str | None = None
) -> Partition:
    """Sort a module's parameters into the three kinds.

    `private` holds the words "norm" (affine parameters) and "bias", or patterns of parameter names such as
    "cls_token". With `head="task"` the head layer's parameters are private too.
    """
    if head not in HEADS:
        raise InputError(f"head is '{head}': choose one of {', '.join(HEADS)}")
    parameters = dict(module.named_parameters())
    if any(nn.parameter.is_lazy(p) for p in parameters.values()):
        raise InputError("the module has lazy layers without a shape yet: run one batch through it first")

    head_name = head_layer_of(module, head_layer)
    maskable = _maskable(module)
    layers: list[Layer] = []
    own: list[str] = []
    frozen: list[str] = []
    start = 0
    for name, parameter in parameters.items():
        in_head = name.rpartition(".")[0] == head_name
        if (head == "task" and in_head) or _is_private(module, name, private):
            own.append(name)
        elif name in maskable and parameter.requires_grad:
            plain = _runs_as_convolution(module, parameter)
            layers.append(Layer(name, tuple(parameter.shape), maskable[name], start, plain))
            start += parameter.numel()
        else:
            frozen.append(name)
    if not layers:
        raise InputError(
            "the network has nothing to mask: it needs at least one Linear, convolution or attention layer "
            "that is not private"
        )
    _check_one_kind(layers, parameters)
    _check_words(private, own)
    return Partition(Layout(tuple(layers)), tuple(own), tuple(frozen), head_name, head == "task", still_parts(module))


def trainable(module: nn.Module) -> Layout:
    """All parameters that may move, whatever kind of layer they belong to."""
    layers: list[Layer] = []
    start = 0
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise InputError("the module has lazy layers without a shape yet: run one batch through it first")
        if parameter.requires_grad and parameter.numel():
            fan_in = max(parameter[0].numel(), 1) if parameter.ndim else 1
            layers.append(Layer(name, tuple(parameter.shape), fan_in, start, _runs_as_convolution(module, parameter)))
            start += parameter.numel()
    if not layers:
        raise InputError("the network has nothing to train: it needs a parameter with requires_grad")
    _check_one_kind(layers, dict(module.named_parameters()))
    return Layout(tuple(layers))


def _runs_as_convolution(module: nn.Module, parameter: Tensor) -> bool:
    users = [(owner, name) for owner, name, used in _uses(module) if used is parameter]
    return all(name == "weight" and _is_plain_convolution(owner) for owner, name in users)


def _is_plain_convolution(layer: nn.Module) -> bool:
    """A 2-D convolution without groups: its memory format may be chosen, and its channels padded."""
    return type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"


def still_parts(module: nn.Module) -> tuple[str, ...]:
    """Submodules whose parameters are all frozen by the user."""

    def frozen(part: nn.Module) -> bool:
        parameters = list(part.parameters())
        return bool(parameters) and not any(p.requires_grad for p in parameters)

    return tuple(name for name, part in module.named_modules() if frozen(part))


def _check_words(wanted: Collection[str], found: list[str]) -> None:
    for word in wanted:
        if word not in WORDS and not any(fnmatchcase(name, word) for name in found):
            raise InputError(
                f"private '{word}' matches no parameter: give {', '.join(WORDS)}, or a pattern of parameter names"
            )


def stands_for(module: nn.Module, word: str) -> bool:
    """Whether a word of `private` means anything in this module.

    A norm without parameters counts: its statistics are each task's own whatever `private` says.
    """
    if word == "norm":
        return any(isinstance(part, _NORMS) for part in module.modules())
    return word not in WORDS or any(_is_private(module, name, (word,)) for name, _ in module.named_parameters())


def check_words(module: nn.Module, private: Collection[str]) -> None:
    """Refuse words of `private` that would be recorded and do nothing."""
    for word in private:
        if not stands_for(module, word):
            what = {"norm": "norm layer", "bias": "bias"}[word]
            raise InputError(
                f"private '{word}': the network has no {what} that a task could have its own of: "
                f"leave '{word}' out, or choose a network that has one"
            )


def head_layer_of(module: nn.Module, wanted: str | None = None) -> str:
    """The named layer, or the last Linear one (the last convolution where there is none)."""
    layers: dict[str, nn.Module] = {n: m for n, m in module.named_modules() if isinstance(m, _WEIGHTED)}
    if wanted is not None:
        if wanted not in layers:
            raise InputError(
                f"head_layer '{wanted}' is not a Linear or convolution layer: choose from {', '.join(layers)}"
            )
        return wanted
    if not layers:
        raise InputError("the network has nothing to mask: it needs at least one Linear or convolution layer")
    linear = [name for name, m in layers.items() if isinstance(m, nn.Linear)]
    return linear[-1] if linear else list(layers)[-1]


def _maskable(module: nn.Module) -> dict[str, int]:
    """Names of the parameters that every module using them uses as a layer's weight, with their fan-in.

    A weight tied to an embedding is left out: masking it would mask the embedding as well.
    """
    fan_in: dict[int, int] = {}
    other: set[int] = set()
    for owner, name, parameter in _uses(module):
        if isinstance(owner, _WEIGHTED) and name == "weight":
            fan_in[id(parameter)] = _fan_in(owner, parameter)
        elif isinstance(owner, nn.MultiheadAttention) and name in _ATTENTION_WEIGHTS:
            fan_in[id(parameter)] = parameter.shape[1]
        else:
            other.add(id(parameter))
    return {
        name: fan_in[id(p)]
        for name, p in module.named_parameters()
        if id(p) in fan_in and id(p) not in other and p.numel() > 0
    }


def _uses(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, name, parameter


def _fan_in(layer: nn.Module, weight: Tensor) -> int:
    """Inputs that one output unit sums over."""
    if isinstance(layer, _TRANSPOSED):  # [in, out / groups, *kernel]
        return weight.shape[0] // layer.groups * prod(weight.shape[2:])
    return prod(weight.shape[1:])


def _is_private(module: nn.Module, name: str, wanted: Collection[str]) -> bool:
    owner_name, _, short = name.rpartition(".")
    if "bias" in wanted and short.endswith("bias"):
        return True
    if "norm" in wanted and isinstance(module.get_submodule(owner_name), _NORMS):
        return True
    return any(fnmatchcase(name, pattern) for pattern in wanted)


def _check_one_kind(layers: list[Layer], parameters: dict[str, nn.Parameter]) -> None:
    kinds = {parameters[layer.name].dtype for layer in layers}
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
        listed = ", ".join(sorted(str(kind) for kind in kinds))
        raise InputError(f"the weights are of type {listed}: convert the module to float32 or float64")
