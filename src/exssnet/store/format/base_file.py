"""The base of a model directory: the network and its initial weights.

A built-in network takes a few words of JSON: its weights follow from the seed. For a user's module one file has the
tensors that do not follow from a seed. Code is never stored, and never imported because a directory names it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from exssnet.core.network import MaskedNetwork
from exssnet.core.partition import stands_for
from exssnet.core.proof import combined_digest, digests_of
from exssnet.errors import InputError, ParseError, StoreError, unknown
from exssnet.io.typed import Between, Length, line, short, typed
from exssnet.methods import methods, parse
from exssnet.methods.masks.supsup import SupSup
from exssnet.models import MODELS, build, fitting, names
from exssnet.train.learner import Learner

INITS = ("hashed", "keep")
HEAD_ROWS = 2  # outputs of the network as built; every task has a head of its own size
MOST_WEIGHTS = 2**30  # of a built-in network
MOST_NUMBERS = 2**28  # in an input

Word = Annotated[str, Length(1, 1000)]


@dataclass(frozen=True)
class Base:
    """Description of a model. `network` is a built-in name, or None for a module that the caller passes."""

    network: Word | None
    input: Annotated[tuple[Annotated[int, Between(1, 2**31)], ...], Length(1, 16)]
    width: Annotated[int | float, Between(0, 10**6)] | None
    density: Annotated[int | float, Between(0, 1)]
    seed: Annotated[int, Between(-(2**63), 2**64 - 1)]
    method: Word
    init: Word
    private: tuple[Word, ...]
    head_layer: Word | None
    structure: tuple[Word, ...] = ()  # kind, name and shape of every tensor
    first: str = ""  # digest of the initial weights and of everything that tasks share

    def __post_init__(self) -> None:
        if prod(self.input) > MOST_NUMBERS:
            raise InputError(f"input is {short(self.input)}: more than {MOST_NUMBERS:,} numbers")

    def json(self) -> dict[str, Any]:
        return {
            "network": self.network, "input": list(self.input), "width": self.width, "density": self.density,
            "seed": self.seed, "method": self.method, "init": self.init, "private": list(self.private),
            "head_layer": self.head_layer, "structure": list(self.structure), "first": self.first,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Base:
        """Parse a base; unknown names are ignored."""
        try:
            return typed(dict(found), cls, "the manifest's base")
        except ParseError as error:
            raise StoreError(str(error)) from error

    def model(self, module: nn.Module | None, tensors: Mapping[str, Tensor] | None = None) -> Learner:
        """Make the model without tasks; a user's module gets the stored tensors."""
        if self.network is not None and module is not None:
            raise InputError(f"the model has the built-in network {self.network}: do not pass a module")
        if self.network is None and module is None:
            raise InputError("the model has your own network: pass the module, on the command line with --network")
        module = self._built() if module is None else module
        private = self.private
        if self.structure:  # earlier versions recorded patterns that match nothing, which are refused now
            private = tuple(word for word in private if stands_for(module, word))
        model = Learner(
            module, self.density, self.seed, method=self.method, init=self.init, private=private, head="task",
            head_layer=self.head_layer,
        )  # fmt: skip
        network = model.network
        if self.structure and (other := _difference(structure_of(network), self.structure)):
            raise StoreError(f"the module differs from the one the model was created with: {other}")
        if tensors is not None:
            _put(network, tensors)
        if self.first and first_digest(network) != self.first:
            raise StoreError("the network's initial weights differ from those the model was created with")
        return model

    def _built(self) -> nn.Module:
        assert self.network is not None
        if self.network not in names():
            raise StoreError(
                f"the model has the network '{self.network}', which this version does not have: upgrade exssnet"
            )
        self._require_small(self.network)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build(self.network, self.input, HEAD_ROWS, self.width)

    def _require_small(self, network: str) -> None:
        """Refuse a network that needs too much memory before building it."""
        try:
            with torch.device("meta"):
                weights = sum(each.numel() for each in build(network, self.input, HEAD_ROWS, self.width).parameters())
        except (RuntimeError, ValueError, OverflowError) as error:
            raise InputError(f"the network '{network}' cannot be built for these inputs: {line(error)}") from error
        if weights > MOST_WEIGHTS:
            raise InputError(
                f"the network '{network}' for inputs of shape {list(self.input)} would have {weights:,} weights, more "
                f"than {MOST_WEIGHTS:,}: choose a smaller width or another network"
            )


def new_base(
    network: str | nn.Module | None, input: Sequence[int], width: float | None, density: float, seed: int, method: str,
    init: str | None, private: Collection[str] | None, head_layer: str | None,
) -> tuple[Base, dict[str, Tensor] | None]:  # fmt: skip
    """Make a base and its stored tensors. Network and `private` default to those that fit the input."""
    check_method(method)
    if not input or min(input) < 1:
        raise InputError(f"input is {tuple(input)}: give the shape of one example, for example 3,32,32")
    network = fitting(input) if network is None else network
    module = network if isinstance(network, nn.Module) else None
    name = network if isinstance(network, str) else None
    init = init or ("hashed" if module is None else "keep")
    if init not in INITS:  # a later version of a library may draw other weights
        raise InputError(f"init is '{init}': choose one of {', '.join(INITS)}")
    if name in MODELS:  # defaults may change in a later version
        width = MODELS[name].width if width is None else width
        private = MODELS[name].private if private is None else private
    private = private or ()
    base = Base(name, tuple(input), width, density, seed, method, init, tuple(private), head_layer)
    if name is not None and name not in names():
        raise unknown("network", name, names())
    if module is None and init == "keep":
        raise InputError(f"init 'keep' needs your own module: the weights of {name} follow from the seed")
    model = base.model(module)
    stored = None if module is None else _tensors(model.network, init)
    return (
        replace(base, structure=structure_of(model.network), first=first_digest(model.network)),
        stored,
    )


def check_method(name: str) -> None:
    """Refuse a method that changes weights of earlier tasks: a directory has one value per weight."""
    known = [name for name, kind in methods().items() if issubclass(kind, SupSup) and kind.exclusive]
    if parse(name)[0].name not in known:
        raise InputError(
            f"method '{name}' cannot be stored in a model directory, which has masks over weights that no later task "
            f"changes: choose one of {', '.join(f'{name}+kkt, {name}' for name in known)}"
        )


def structure_of(network: MaskedNetwork) -> tuple[str, ...]:
    """Kind, name and shape of every tensor, in the module's order."""
    shapes = [("masked", layer.name, layer.shape) for layer in network.layout.layers]
    shapes += [("private", name, _shape(network, name, tensor)) for name, tensor in network.private_start.items()]
    shapes += [("frozen", name, tuple(tensor.shape)) for name, tensor in network.frozen.items()]
    shapes += [("buffer", name, tuple(tensor.shape)) for name, tensor in network.buffers.items()]
    return tuple(f"{kind} {name} {'x'.join(map(str, shape))}".rstrip() for kind, name, shape in shapes)


def _difference(found: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    """Describe the first tensor that differs; empty if all are equal."""
    for one, other in zip_longest(found, wanted, fillvalue="nothing"):
        if one != other:
            return f"it has {one!r}, the model {other!r}"
    return ""


def _shape(network: MaskedNetwork, name: str, tensor: Tensor) -> tuple[int, ...]:
    """Drop the number of rows of a head, which is the number of classes of a task."""
    head = name.rpartition(".")[0] == network.partition.head
    return tuple(tensor.shape[1:] if head else tensor.shape)


def first_digest(network: MaskedNetwork) -> str:
    """Digest of the initial weights and everything that tasks share; heads are drawn for each task."""
    head = network.partition.head
    private = {name: t for name, t in network.private_start.items() if name.rpartition(".")[0] != head}
    shared = {"weights": network.weights, **network.frozen, **network.buffers, **private}
    return combined_digest(digests_of(shared))


def _tensors(network: MaskedNetwork, init: str) -> dict[str, Tensor]:
    found = {f"frozen.{name}": tensor for name, tensor in network.frozen.items()}
    found |= {f"buffer.{name}": tensor for name, tensor in network.buffers.items()}
    found |= {f"private.{name}": tensor for name, tensor in network.private_start.items()}
    return found | ({"weights": network.weights} if init == "keep" else {})


def _stands_for(network: MaskedNetwork, name: str, tensor: Tensor, there: Tensor) -> bool:
    """Whether a stored tensor has the shape of the network's, and its type unless both are floats."""
    shapes = (_shape(network, name.partition(".")[2] or name, each) for each in (tensor, there))
    floats = tensor.is_floating_point() and there.is_floating_point()
    return len(set(shapes)) == 1 and tensor.ndim == there.ndim and (floats or tensor.dtype == there.dtype)


def _put(network: MaskedNetwork, tensors: Mapping[str, Tensor]) -> None:
    groups = {"frozen": network.frozen, "buffer": network.buffers, "private": network.private_start}
    for name, tensor in tensors.items():
        group, _, short = name.partition(".")
        there = network.weights if name == "weights" else groups.get(group, {}).get(short)
        if there is None or not _stands_for(network, name, tensor, there):
            raise StoreError(f"tensor '{name}' of the base file does not match the network")
        if name == "weights":
            network.weights = tensor.clone()
        else:
            groups[group][short] = tensor.clone()
    network.proof.seal()
