"""What `predict` is given by hand: one example without a batch, whole numbers, a table where images are meant."""

from pathlib import Path

import numpy as np
import pytest
import torch

from exssnet.data.files.labelled import read_inputs
from exssnet.errors import DataError

VECTORS = {"kind": "array", "shape": [4], "dtype": "float32"}
IMAGES = {"kind": "image", "shape": [1, 8, 8]}
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("example", "recipe"),
    [
        (DRAW.normal(size=4).astype(np.float32), VECTORS),
        (DRAW.integers(0, 255, (8, 8), dtype=np.uint8), IMAGES),
        (DRAW.integers(0, 255, (1, 8, 8), dtype=np.uint8), IMAGES),
    ],
)
def test_one_example_by_itself_is_read_as_a_batch_of_one(tmp_path: Path, example: np.ndarray, recipe: dict):
    np.save(tmp_path / "one.npy", example)
    np.save(tmp_path / "batch.npy", example.reshape(1, *recipe["shape"]))
    (one, names), (batch, _) = (read_inputs([tmp_path / name], recipe) for name in ("one.npy", "batch.npy"))
    assert torch.equal(one, batch)
    assert names == ["one.npy:0"]


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint32])
def test_whole_numbers_are_taken_where_floats_were_learned_from(tmp_path: Path, dtype: type):
    x = np.arange(12).reshape(3, 4)
    np.save(tmp_path / "x.npy", x.astype(dtype))
    assert torch.equal(read_inputs([tmp_path / "x.npy"], VECTORS)[0], torch.from_numpy(x).float())


def test_bytes_are_not_taken_for_floats_nor_floats_for_words(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.uint8))
    with pytest.raises(DataError, match="the inputs are uint8, but the task was learned from float32; convert them"):
        read_inputs([tmp_path / "x.npy"], VECTORS)
    np.save(tmp_path / "y.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(DataError, match="the inputs are float32, but the task was learned from int64; convert them"):
        read_inputs([tmp_path / "y.npy"], VECTORS | {"dtype": "int64"})


def test_a_table_where_images_were_learned_from_is_said_to_be_one(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: the task was learned from images; give image files"):
        read_inputs([tmp_path / "a.csv"], IMAGES)
