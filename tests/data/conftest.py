"""Real data from the mirror, and small data in the hub's layout."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from exssnet.data import Dataset, load

WriteParquet = Callable[..., Path]


@pytest.fixture(scope="session")
def mnist(mirror: Path) -> Dataset:
    return load("mnist")


@pytest.fixture(scope="session")
def cifar100(mirror: Path) -> Dataset:
    return load("cifar100")


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load("digits")


def encode(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def _write(
    file: Path,
    images: list[np.ndarray | bytes | None],
    labels: list[int | None],
    names: list[str] | None = None,
    columns: tuple[str, str] = ("image", "label"),
    group: int = 8,
) -> Path:
    rows = [{"bytes": encode(i) if isinstance(i, np.ndarray) else i, "path": None} for i in images]
    image = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({columns[0]: image, columns[1]: pa.array(labels, pa.int64())})
    if names:
        features = {columns[1]: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=group)
    return file


@pytest.fixture(scope="session")
def write_parquet() -> WriteParquet:
    """Images in the hub's layout: bytes are written as they are, arrays as PNG."""
    return _write


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_parquet: WriteParquet) -> Callable[..., Path]:
    """Make a mirror with a tiny `ylecun/mnist`; returns a function that overwrites its train images and labels."""
    monkeypatch.setenv("EXSSNET_DATA", str(tmp_path / "mirror"))
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mirror/ylecun/mnist/data"

    def write(
        images: list[np.ndarray | bytes | None] | None = None,
        labels: list[int | None] | None = None,
        **options: object,
    ) -> Path:
        random = np.random.default_rng(0)
        plain = list(random.integers(0, 256, (40, 28, 28), dtype=np.uint8))
        digits = [row % 10 for row in range(40)]
        write_parquet(folder / "test-00000-of-00001.parquet", plain[:20], digits[:20])
        return write_parquet(folder / "train-00000-of-00001.parquet", images or plain, labels or digits, **options)

    return write
