"""Whether a network's module takes some inputs and gives logits: said in one line before anything is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet.core.network import MaskedNetwork
from exssnet.errors import InputError


def check_input(network: MaskedNetwork, x: Tensor, classes: int, *, training: bool = False) -> None:
    """Refuse inputs that the module cannot take, or outputs that are not logits."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[network.device] if x.is_cuda else []):
            weights = network.runner.weights(network.weights.clone())  # another thread may learn
            network.run(weights, network.start_private("", classes), classes, x, training=training)
    except InputError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        where = f"a training batch of {len(x)}, of shape" if training else "inputs of shape"
        why = " ".join(str(error).split())
        raise InputError(f"the module cannot take {where} {list(x.shape[1:])}: {why}") from error
