"""The built-in networks, by name: plain modules that know nothing of masks. Those of the paper have no biases.

The classifier is called `head` in every one of them. Names, widths and descriptions are read without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from exssnet.errors import InputError, unknown

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Entry:
    """Where a network is made, by `builder(input_shape, classes, width)`, and what to know before."""

    module: str
    builder: str
    width: float
    description: str
    private: tuple[str, ...] = ()  # what each task of a model directory has its own of, unless told otherwise


MODELS = {
    "lenet-300-100": Entry("lenet", "LeNet", 1, "MLP with 300 and 100 hidden units; width multiplies them"),
    "mlp": Entry("lenet", "mlp", 1, "the same with biases, which each task has its own of: for tables", ("bias",)),
    "resnet18": Entry("resnet", "resnet18", 20, "ResNet-18 for 32×32 images; width = filters of the stem"),
    "resnet50": Entry("resnet", "resnet50", 64, "ResNet-50 with 7×7/2 stem and max-pool; width = filters of the stem"),
    "text-cnn": Entry("text_cnn", "TextCNN", 200, "convolutions over token states with Tanh; width = filters of each"),
    "text-cnn-relu": Entry("text_cnn", "relu", 200, "the same with ReLU, as in the published code"),
}


def build(name: str, input_shape: Sequence[int], classes: int, width: float | None = None) -> "nn.Module":
    """A network for inputs of this shape (without the batch), at its usual width unless told another."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if not input_shape or min(input_shape) < 1:
        raise InputError(f"input shape {tuple(input_shape)} has no size: give one such as (3, 32, 32)")
    if classes < 1:
        raise InputError(f"{classes} classes: a network needs at least one output")
    entry = MODELS[name]
    builder = getattr(import_module(f"{__name__}.{entry.module}"), entry.builder)
    network: nn.Module = builder(tuple(input_shape), classes, entry.width if width is None else width)
    return network


def fitting(input_shape: Sequence[int]) -> str:
    """The usual network for inputs of this shape: convolutions where there is something to see.

    Inputs that are not images get biases. Columns are standardised, so what tells classes apart may lie anywhere
    around zero, and without a bias a ReLU network can only cut through the origin. Token states have the shape of an
    array, so `text-cnn` is asked for by name.
    """
    if len(input_shape) != 3:
        return "mlp"
    return "resnet18" if input_shape[0] == 3 or input_shape[1] > 28 else "lenet-300-100"


def names() -> list[str]:
    """The names `build` knows."""
    return list(MODELS)


def describe() -> dict[str, str]:
    """One line on each network, by name."""
    return {name: entry.description for name, entry in MODELS.items()}
