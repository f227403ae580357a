"""Houlsby's adapters: a bottleneck behind every projection of a transformer, before the residual sum.

They are put in by forward hooks, so the encoder's own code and weights stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exssnet.errors import InputError
from exssnet.models.text_classifier import linear

# of attention and feed-forward: BERT and RoBERTa, MPNet, DistilBERT, GPT-2, Llama
PROJECTIONS = ("output.dense", "attn.o", "out_lin", "lin2", "c_proj", "o_proj", "down_proj")


class Adapter(nn.Module):
    """x + W₂·gelu(W₁x + b₁) + b₂."""

    def __init__(self, width: int, size: int, sd: float, generator: torch.Generator) -> None:
        super().__init__()
        self.down, self.up = linear(width, size, generator, sd), linear(size, width, generator, sd)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.up(nn.functional.gelu(self.down(x)))
        return x + changed


def put_in(encoder: nn.Module, width: int, size: int, sd: float, generator: torch.Generator) -> None:
    """Give every projection an adapter, `<projection>.adapter`, that its outputs go through."""
    found = [module for name, module in encoder.named_modules() if name.endswith(PROJECTIONS)]
    if not found:
        raise InputError(
            f"{type(encoder).__name__} has no layer called one of {', '.join(PROJECTIONS)}: adapters have no position"
        )
    for layer in found:
        layer.add_module("adapter", Adapter(width, size, sd, generator))
        layer.register_forward_hook(_through_adapter)


def _through_adapter(layer: nn.Module, _: object, output: Tensor) -> Tensor:
    """The layer is passed in, and not bound: copies of an encoder have adapters of their own."""
    found: Tensor = layer.get_submodule("adapter")(output)
    return found


def norms(encoder: nn.Module) -> list[str]:
    """The names of the parameters of layer norms."""
    of_kind = [(n, m) for n, m in encoder.named_modules() if type(m).__name__.endswith(("LayerNorm", "RMSNorm"))]
    return [f"{name}.{own}" for name, module in of_kind for own, _ in module.named_parameters(recurse=False)]
