"""Data sets, streams of tasks, and augmentation on the device."""

from exssnet.data.benchmarks.hub import parquet_files
from exssnet.data.benchmarks.lazy import LazyImages, image_folder
from exssnet.data.benchmarks.registry import SOURCES, Source, find_source
from exssnet.data.benchmarks.sources import load
from exssnet.data.dataset import Dataset, Split
from exssnet.data.files.examples import as_data, as_inputs, from_tensors
from exssnet.data.streams import permuted, rotated, split
from exssnet.data.tasks import Data, Stream, Task, check
from exssnet.data.tensors import Shared, TensorData, TensorSplit
from exssnet.data.transforms import (
    HorizontalFlip,
    Normalize,
    Permute,
    Pipeline,
    RandomCrop,
    Rotate,
    Transform,
)

__all__ = [
    "SOURCES",
    "Data",
    "Dataset",
    "HorizontalFlip",
    "LazyImages",
    "Normalize",
    "Permute",
    "Pipeline",
    "RandomCrop",
    "Rotate",
    "Shared",
    "Source",
    "Split",
    "Stream",
    "Task",
    "TensorData",
    "TensorSplit",
    "Transform",
    "as_data",
    "as_inputs",
    "check",
    "find_source",
    "from_tensors",
    "image_folder",
    "load",
    "parquet_files",
    "permuted",
    "rotated",
    "split",
]
