"""The data mirror, a cache that lives for one test session, one thread for torch."""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings
from PIL import Image
from tests import parts
from tests.forks import Forks
from tests.parts import missing

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined

WriteParquet = Callable[..., Path]

# the first call of a torch operator can take longer than hypothesis' deadline
settings.register_profile("exssnet", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "30")))
settings.load_profile("exssnet")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(parts)
    if torch.cuda.is_available():
        config.addinivalue_line("filterwarnings", "default")  # the compiler warns of its own


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXSSNET_CACHE", str(shared / "exssnet-cache"))
        yield


@pytest.fixture(scope="session")
def exssnet() -> Iterator[Forks]:
    """Commands as a user gives them, each in a process of its own."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def mirror() -> Path:
    if not os.environ.get("EXSSNET_DATA"):
        missing("set EXSSNET_DATA to a folder with ylecun/mnist and uoft-cs/cifar100 in the hub's parquet layout")
    return Path(os.environ["EXSSNET_DATA"])


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
