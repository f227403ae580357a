"""Real data from the mirror, and small data in the hub's layout."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

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
