"""Nothing waits for a FIFO where a benchmark or the cache has a file: refused in a line, or made again."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LOAD = """
import sys
import torch
from exssnet.data import image_folder, load, split
from exssnet.errors import DataError
name, classes = sys.argv[1], [int(label) for label in sys.argv[2:]]
try:
    data = load(name) if classes else image_folder(name)
    task = split(data, 1, classes or None)[0].train
    print(round(task.batch(torch.arange(len(task)))[0].sum().item(), 3))
except DataError as error:
    print(error)
"""
IMAGES = [np.full((40, 50, 3), 20 * number, np.uint8) for number in range(8)]
FOUR = [0, 1, 2, 999]


def loaded(name: str | Path, *classes: int) -> str:
    """What a process of its own says, which can be given up."""
    command = [sys.executable, "-c", LOAD, str(name), *map(str, classes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def put_pipe(file: Path) -> Path:
    file.unlink()
    os.mkfifo(file)
    return file


@pytest.fixture
def imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_parquet) -> Path:
    monkeypatch.setenv("EXSSNET_DATA", str(tmp_path / "mirror"))
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "mirror/ILSVRC/imagenet-1k/data"
    write_parquet(home / "validation-00000-of-00001.parquet", IMAGES[:4], FOUR)
    return write_parquet(home / "train-00000-of-00001.parquet", IMAGES, FOUR * 2)


def test_a_pipe_for_a_benchmarks_parquet_is_refused(imagenet: Path):
    put_pipe(imagenet)
    assert loaded("imagenet", *FOUR) == f"{imagenet} is a FIFO: a regular file was expected"


def test_a_pipe_or_a_huge_file_for_an_image_of_a_folder_is_refused(tmp_path: Path):
    from PIL import Image

    for part in ("train", "val"):
        for number, image in enumerate(IMAGES[:2]):
            (tmp_path / part / str(number)).mkdir(parents=True)
            Image.fromarray(image).save(tmp_path / part / str(number) / "1.png")
    pipe = put_pipe(tmp_path / "train/1/1.png")
    assert loaded(tmp_path) == f"{pipe} is a FIFO: a regular file was expected; replace it by an image"
    pipe.unlink()
    with pipe.open("wb") as file:
        try:
            file.truncate(10**12)  # takes no room on the disk
        except OSError:
            pytest.skip("needs a file system with sparse files of 1 TB")
    assert loaded(tmp_path).startswith(f"{pipe} has 1,000,000,000,000 bytes: at most")


def test_a_pipe_for_a_pack_of_encoded_images_is_replaced(imagenet: Path, tmp_path: Path):
    assert_made_again(tmp_path / "cache/packs", "imagenet", *FOUR)


def test_a_pipe_for_decoded_images_is_replaced(small_mnist, tmp_path: Path):
    small_mnist()
    assert_made_again(tmp_path / "cache", "mnist", *range(10))


def assert_made_again(folder: Path, name: str, *classes: int) -> None:
    expected = loaded(name, *classes)
    assert float(expected)
    for file in (made := sorted(folder.rglob("*.safetensors"))):
        put_pipe(file)
    assert made
    assert loaded(name, *classes) == expected
    assert all(file.is_file() for file in made)
