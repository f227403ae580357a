"""`Model`: one network of your own that learns task after task and forgets none of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from exssnet.store.stored_model import StoredModel
from exssnet.train.learner import Learner


class Model(Learner):
    """A shared network in memory and the tasks learned on it; `create` and `open` have one that lives in a directory.

        model = exssnet.Model(module, density=0.1, seed=0)
        model.learn("birds", (images, labels), epochs=(15, 15))
        model.predict(photos, task="birds")

    The module is copied, never changed. Its Linear, convolution and attention weights are redrawn from the seed
    (`init="keep"` leaves a pretrained module's weights) and shared by all tasks; `private` names what each task
    gets a trained copy of ("norm", "bias", or patterns of parameter names); `head="task"` gives every task a head
    of its own, with as many outputs as the task has classes. `precision` and `compile` say how a GPU computes.
    """

    @staticmethod
    def create(
        path: str | Path, network: str | nn.Module | None = None, input: Sequence[int] = (3, 32, 32), *,
        density: float = 0.1, seed: int = 0, method: str = "exssnet+kkt", width: float | None = None,
        init: str | None = None, private: Collection[str] | None = None, head_layer: str | None = None,
        device: str | torch.device | None = None,
    ) -> StoredModel:  # fmt: skip
        """Make a model directory, to which tasks are added for years; see `StoredModel.create`."""
        return StoredModel.create(
            path, network, input, density=density, seed=seed, method=method, width=width, init=init, private=private,
            head_layer=head_layer, device=device,
        )  # fmt: skip

    @staticmethod
    def open(
        path: str | Path, module: nn.Module | None = None, device: str | torch.device | None = None
    ) -> StoredModel:
        """Open a model directory; `module` is the network where it is one of your own."""
        return StoredModel.open(path, module, device)
