"""Load data sets by name, decoded once into cached tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from exssnet.data.benchmarks.cache import cached, fingerprint
from exssnet.data.benchmarks.hub import parquet_files
from exssnet.data.benchmarks.parquet import class_names, decode
from exssnet.data.benchmarks.registry import Source, find_source
from exssnet.data.dataset import Dataset
from exssnet.data.streams import rows_by_class
from exssnet.data.tensors import TensorSplit
from exssnet.io.disk import cache_folder
from exssnet.randomness import generator


def load(name: str) -> Dataset:
    """Load a data set by short name or hub id; `exssnet.data.SOURCES` lists them."""
    source = find_source(name)
    if source.hub_id is None:
        return _digits(source)
    if source.lazy:
        from exssnet.data.benchmarks.lazy import hub_images

        return hub_images(source)
    train = _decoded(source, source.hub_id, source.train_split)
    test = _decoded(source, source.hub_id, source.test_split)
    names = class_names(parquet_files(source.hub_id, source.train_split)[0], source)
    return Dataset(source.name, train, test, names, source.shape)


def _decoded(source: Source, hub_id: str, split: str) -> TensorSplit:
    files = parquet_files(hub_id, split)
    key = fingerprint(files, hub_id, split)
    images, labels, digest = cached(
        cache_folder() / "images" / f"{source.name}-{split}-{key}.safetensors", lambda: decode(files, source)
    )
    return TensorSplit(images, labels, source.augment, source.normalize(), digest)


def _digits(source: Source) -> Dataset:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.images).to(torch.uint8).unsqueeze(1)  # [1797, 1, 8, 8], 0..16
    labels = torch.from_numpy(found.target).to(torch.int64)
    test = _every_fourth(labels, source.classes)
    train_split, test_split = (
        TensorSplit(images[part], labels[part], source.augment, source.normalize()) for part in (~test, test)
    )
    names = [str(name) for name in found.target_names]
    return Dataset(source.name, train_split, test_split, names, source.shape)


def _every_fourth(labels: Tensor, classes: int) -> Tensor:
    """A quarter of every class as a mask; part of the data set's definition, independent of seeds."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label, rows in enumerate(rows_by_class(labels, classes)):
        order = torch.randperm(len(rows), generator=generator(0, "digits", label))
        chosen[rows[order[: len(rows) // 4]]] = True
    return chosen
