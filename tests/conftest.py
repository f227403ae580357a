"""The data mirror, a cache that lives for one test session, one thread for torch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# the first call of a torch operator can take longer than hypothesis' deadline
settings.register_profile("exssnet", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "60")))
settings.load_profile("exssnet")


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
def mirror() -> Path:
    if found := os.environ.get("EXSSNET_DATA"):
        return Path(found)
    message = "set EXSSNET_DATA to a folder with ylecun/mnist and uoft-cs/cifar100 in the hub's parquet layout"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
