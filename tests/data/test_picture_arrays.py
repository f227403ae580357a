"""Pictures in uint8 arrays of any size become what the same pictures in files become."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from exssnet import Model
from exssnet.data.files.labelled import read_inputs, read_labelled
from exssnet.errors import DataError
from exssnet.store import predictions

DIGITS = load_digits()
CHINA, FLOWER = (Image.fromarray(photo) for photo in load_sample_images().images)


def photos(width: int, height: int, mode: str) -> list[Image.Image]:
    """Two pictures of china, then two of a flower."""
    whole = [photo.convert(mode) for photo in (CHINA, CHINA.rotate(180), FLOWER, FLOWER.rotate(180))]
    return [photo.resize((width, height)) for photo in whole]


def npz(file: Path, x: np.ndarray) -> Path:
    np.savez(file, x=x, y=np.arange(len(x)) * 2 // len(x))
    return file


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 24, 40)])
@pytest.mark.parametrize("size", [(28, 28), (20, 45), (640, 427)])  # the last is shrunk, in threads
@pytest.mark.parametrize("layout", ["NHW", "NHW1", "N1HW", "NHW3", "N3HW"])
def test_a_picture_is_the_same_input_from_an_array_and_from_a_file(
    layout: str, size: tuple[int, int], shape: tuple[int, int, int], tmp_path: Path
):
    pictures = photos(*size, "RGB" if "3" in layout else "L")
    for row, picture in enumerate(pictures):
        (tmp_path / "files" / str(row // 2)).mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "files" / str(row // 2) / f"{row}.png")
    x = np.stack([np.asarray(picture) for picture in pictures])
    x = x[..., None] if layout == "NHW1" else x[:, None] if layout == "N1HW" else x
    x = x.transpose(0, 3, 1, 2) if layout == "N3HW" else x
    from_files = read_labelled(tmp_path / "files", shape)
    from_arrays = read_labelled(npz(tmp_path / "a.npz", x), shape)
    assert torch.equal(from_arrays.inputs, from_files.inputs)
    assert torch.equal(from_arrays.labels, from_files.labels)
    np.save(tmp_path / "x.npy", x)
    for recipe in (from_arrays.recipe, from_files.recipe):  # whichever a task was learned from
        assert torch.equal(read_inputs([tmp_path / "x.npy"], recipe)[0], from_files.inputs)
        assert torch.equal(read_inputs([tmp_path / "files"], recipe)[0], from_files.inputs)


def test_channels_that_could_be_first_or_last_are_first_unless_the_network_s_own_size_says_last(tmp_path: Path):
    x = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 3), np.uint8)
    first = read_labelled(npz(tmp_path / "a.npz", x), (3, 10, 6))
    wide = np.asarray(Image.fromarray(x[0].transpose(1, 2, 0)).resize((6, 10), Image.Resampling.BILINEAR))
    assert torch.equal(first.inputs[0], torch.from_numpy(wide.transpose(2, 0, 1).copy()))
    last = read_labelled(tmp_path / "a.npz", (3, 3, 5))
    assert torch.equal(last.inputs, torch.from_numpy(x).permute(0, 3, 1, 2))
    assert torch.equal(read_labelled(tmp_path / "a.npz").inputs, torch.from_numpy(x))


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (np.zeros((4, 28, 28), np.float32), (3, 32, 32)),  # of a range that only its owner knows
        (np.zeros((4, 28, 28), np.int64), (3, 32, 32)),
        (np.zeros((4, 28, 28, 5), np.uint8), (3, 32, 32)),
        (np.zeros((4, 28, 3), np.uint8), (3, 32, 32)),  # one picture, not many that are three pixels wide
        (np.zeros((4, 784), np.uint8), (1, 28, 28)),
        (np.zeros((4, 0, 28), np.uint8), (1, 28, 28)),
        (np.zeros((4, 28, 28), np.uint8), (64,)),
        (np.zeros((4, 28, 28), np.uint8), (2, 28, 28)),
    ],
)
def test_arrays_of_another_shape_that_are_no_pictures_stay_refused(x: np.ndarray, shape: tuple, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        read_labelled(npz(tmp_path / "a.npz", x), shape)
    takes = ", ".join(map(str, shape))
    assert str(caught.value).endswith(f"a.npz: the inputs have shape {list(x.shape)}, the network needs [N, {takes}]")


def test_a_task_of_28x28_arrays_is_learned_evaluated_and_asked_on_a_network_for_32x32_in_colour(tmp_path: Path):
    wanted = DIGITS.target < 3
    pixels = (DIGITS.images[wanted] * 15.9375).astype(np.uint8)
    x = np.stack([np.asarray(Image.fromarray(picture).resize((28, 28))) for picture in pixels])
    np.savez(tmp_path / "digits.npz", x=x, y=DIGITS.target[wanted])
    np.save(tmp_path / "x.npy", x[:30])
    Image.fromarray(x[0]).save(tmp_path / "x.png")
    model = Model.create(tmp_path / "model", "lenet-300-100", input=(3, 32, 32), width=0.3)
    model.learn("digits", tmp_path / "digits.npz", epochs=(6, 6))
    assert predictions.evaluate(model, tmp_path / "digits.npz", "digits").accuracy > 95
    answers = predictions.answers(model, [tmp_path / "x.npy", tmp_path / "x.png"], "digits")
    assert [answer.name for answer in answers] == [*(f"x.npy:{row}" for row in range(30)), "x.png"]
    right = [answer.label == str(label) for answer, label in zip(answers, DIGITS.target[wanted], strict=False)]
    assert np.mean(right) > 0.9
    assert answers[-1].probabilities == pytest.approx(answers[0].probabilities)


def test_one_picture_in_colour_is_not_three_grey_ones(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros((3, 32, 32), np.uint8))
    inputs, _ = read_inputs([tmp_path / "one.npy"], {"kind": "array", "shape": [3, 32, 32], "dtype": "uint8"})
    assert inputs.shape == (1, 3, 32, 32)


def test_floats_that_come_channels_last_make_a_network_of_so_many_channels(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((6, 9, 8, 3), np.float32), y=np.arange(6) % 2)
    assert read_labelled(tmp_path / "x.npz").inputs.shape == (6, 3, 9, 8)


def test_pictures_are_scaled_alike_whether_they_come_in_arrays_or_in_files(tmp_path):
    model = Model.create(tmp_path / "model", "lenet-300-100", (1, 8, 8), width=0.1)
    for name, digits in (("low", (0, 1)), ("high", (8, 9))):
        rows = np.isin(DIGITS.target, digits)
        np.savez(tmp_path / f"{name}.npz", x=(DIGITS.images[rows] * 15).astype(np.uint8), y=DIGITS.target[rows])
        model.learn(name, tmp_path / f"{name}.npz", epochs=(1, 1))
    low, high = model.cards
    assert low["scaling"] == high["scaling"]
    assert model.route(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "one-shot").tasks == ("low", "high")
