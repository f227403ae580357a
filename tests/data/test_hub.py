"""The download path against a real HTTP server that answers as the hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

COMMIT = "f" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves `ylecun/mnist`: the list of files with their stated hashes, and the files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.stated = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        self.downloads: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.removeprefix(f"/datasets/ylecun/mnist/resolve/{COMMIT}/")
        if path == "/api/datasets/ylecun/mnist":
            self._send(json.dumps(self._info()).encode(), {"Content-Type": "application/json"})
        elif name in self.server.files:
            stated = f'"{self.server.stated[name]}"'
            self._send(self.server.files[name], {"ETag": stated, "X-Repo-Commit": COMMIT})
            if self.command == "GET":
                self.server.downloads.append(name)
        else:
            self._send(b"", {}, status=404)

    do_HEAD = do_GET

    def _info(self) -> dict[str, object]:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": "e" * 40,
                "lfs": {"sha256": self.server.stated[name], "size": len(content), "pointerSize": 130},
            }
            for name, content in self.server.files.items()
        ]
        return {"id": "ylecun/mnist", "sha": COMMIT, "siblings": siblings}

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, write_parquet) -> Iterator[FakeHub]:
    images = list(np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8))
    labels = [row % 10 for row in range(12)]
    files = {}
    for part, count in (("train", 12), ("test", 10)):  # equal files would be fetched only once
        name = f"mnist/{part}-00000-of-00001.parquet"
        files[name] = write_parquet(tmp_path / "hub" / name, images[:count], labels[:count]).read_bytes()
    server = FakeHub({**files, "README.md": b"not wanted", "mnist/extra-00000-of-00001.parquet": b"not wanted"})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


LOAD = """
from exssnet.data import load
from exssnet.errors import DataError
try:
    print(len(load("mnist").train))
except DataError as error:
    print(error)
"""


def load_in_process(tmp_path: Path, endpoint: str, **environment: str) -> str:
    """What a fresh process says: the hub library reads its settings once, when it is imported."""
    kept = {k: v for k, v in os.environ.items() if k != "EXSSNET_DATA" and not k.lower().endswith("_proxy")}
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "EXSSNET_CACHE": str(tmp_path / "cache"),
        **environment,
    }
    found = subprocess.run(
        [sys.executable, "-c", LOAD], env={**kept, **settings}, capture_output=True, text=True, check=True, timeout=120
    )
    return found.stdout.strip()


def address(server: FakeHub) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_only_wanted_files_are_downloaded_and_only_once_and_then_work_offline(hub, tmp_path):
    assert load_in_process(tmp_path, address(hub)) == "12"
    assert sorted(hub.downloads) == ["mnist/test-00000-of-00001.parquet", "mnist/train-00000-of-00001.parquet"]
    hub.downloads.clear()
    assert load_in_process(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1") == "12"
    assert hub.downloads == []


def test_a_pipe_in_the_place_of_a_receipt_is_not_waited_for(hub, tmp_path):
    assert load_in_process(tmp_path, address(hub)) == "12"
    receipts = sorted((tmp_path / "cache/hub").rglob("*.json"))
    assert len(receipts) == 2
    for receipt in receipts:
        receipt.unlink()
        os.mkfifo(receipt)
    assert load_in_process(tmp_path, address(hub)) == "12"
    assert all(receipt.is_file() for receipt in receipts)


def test_a_file_with_another_hash_than_stated_is_deleted_and_refused_and_a_good_one_taken_later(hub, tmp_path):
    name = "mnist/train-00000-of-00001.parquet"
    good = hub.files[name]
    hub.files[name] = good[:-1] + bytes([good[-1] ^ 1])
    message = load_in_process(tmp_path, address(hub))
    assert name in message
    assert "the copy was deleted" in message
    assert not [file for file in (tmp_path / "hf").rglob("*") if file.is_file() and file.stat().st_size > 500]
    hub.files[name] = good
    assert load_in_process(tmp_path, address(hub)) == "12"


def test_without_network_or_mirror_one_line_says_what_was_looked_for_and_what_to_do(tmp_path):
    message = load_in_process(tmp_path, "http://127.0.0.1:9")
    assert "\n" not in message
    assert "cannot find ylecun/mnist (train-*.parquet)" in message
    assert "set EXSSNET_DATA" in message


def test_a_mirror_that_lacks_the_set_is_named_when_the_hub_fails_too(tmp_path):
    message = load_in_process(tmp_path, "http://127.0.0.1:9", EXSSNET_DATA=str(tmp_path))
    assert f"EXSSNET_DATA={tmp_path}" in message
