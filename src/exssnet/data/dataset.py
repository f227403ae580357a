"""A data set before it is split into tasks: a train and a test split whose rows can be selected."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from exssnet.data.tasks import Data
    from exssnet.data.transforms import Transform


class Split(ABC):
    """Labelled examples of a whole data set, in memory or on disk."""

    labels: Tensor  # int64 [N], on the CPU; classes of the data set
    digest: str

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def select(self, rows: Tensor, labels: Tensor, classes: int, warp: tuple[Transform, ...] = ()) -> Data:
        """The examples at `rows` under a task's labels; `warp` comes after augmentation, before scaling."""


@dataclass(frozen=True)
class Dataset:
    """Two splits over the same classes."""

    name: str
    train: Split
    test: Split
    class_names: list[str]
    shape: tuple[int, ...]  # of one input as the network sees it

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def digests(self) -> dict[str, str]:
        return {"train": self.train.digest, "test": self.test.digest}


def digest_of(inputs: Tensor, labels: Tensor) -> str:
    """SHA-256 of shape, type, decoded inputs and labels, in order."""
    digest = hashlib.sha256(f"{inputs.dtype} {tuple(inputs.shape)}\n".encode())
    for tensor in (inputs, labels):
        digest.update(tensor.cpu().contiguous().numpy().reshape(-1).data)
    return digest.hexdigest()
