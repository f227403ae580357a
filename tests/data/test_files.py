"""A user's own files become tensors, or one line says which file, row and column is wrong."""

import json
import struct
import time
import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits, load_iris, load_sample_images, load_wine

from exssnet.data.files.labelled import hold_out, read_inputs, read_labelled, scaled, scaling
from exssnet.errors import DataError, ExssnetError, InputError

DIGITS = load_digits()
PIXELS = (DIGITS.images * 15.9375).astype(np.uint8)  # 0..16 to 0..255


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Handwritten digits 8, 9 and 10 as PNG; 10 is the zeros, so that order by name and by size differ."""
    root = tmp_path_factory.mktemp("digits")
    for row in range(60):
        label = int(DIGITS.target[row]) or 10
        if label >= 8:
            file = root / str(label) / f"{row:03}.png"
            file.parent.mkdir(exist_ok=True)
            Image.fromarray(PIXELS[row]).save(file)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """The china and flower photographs of scikit-learn, each in many modes and sizes."""
    for name, pixels in zip(["china", "flower"], load_sample_images().images, strict=True):
        folder = tmp_path / "photos" / name
        (folder / "deeper/.cache").mkdir(parents=True)
        photo = Image.fromarray(pixels)
        photo.save(folder / "a.jpg")
        photo.resize((64, 100)).save(folder / "deeper" / "b.PNG")
        photo.quantize(64).save(folder / "c.gif")
        photo.convert("RGBA").save(folder / "d.png")
        photo.convert("CMYK").save(folder / "e.tif")
        photo.convert("L").save(folder / "f.png")
        Image.fromarray(np.asarray(photo.convert("L")).astype(np.uint16) * 257).save(folder / "g.png")
        photo.convert("1").save(folder / "h.bmp")
        (folder / ".hidden.png").write_text("not an image")
        (folder / "deeper/.cache/x.png").write_text("not an image")
        (folder / "notes.txt").write_text("not an image")
    return tmp_path / "photos"


def csv_file(path: Path, bunch, order: list[int] | None = None) -> Path:
    """A scikit-learn table with its class names in words."""
    order = order or list(range(len(bunch.feature_names)))
    rows = zip(bunch.target_names[bunch.target], bunch.data.tolist(), strict=True)
    lines = [[label, *(repr(row[at]) for at in order)] for label, row in rows]
    header = ["kind", *(bunch.feature_names[at] for at in order)]
    path.write_text("".join(",".join(line) + "\n" for line in [header, *lines]))
    return path


def huge_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def test_a_folder_gives_the_pixels_of_its_files_with_numbers_in_order_of_size(digits: Path):
    found = read_labelled(digits, (1, 8, 8))
    assert found.classes == ["8", "9", "10"]
    assert found.recipe == {"kind": "image", "shape": [1, 8, 8]}
    files = sorted(digits.rglob("*.png"))
    assert [found.classes[label] for label in found.labels] == [file.parent.name for file in files]
    assert np.array_equal(found.inputs[:, 0], np.stack([PIXELS[int(file.stem)] for file in files]))
    assert (found.inputs.dtype, found.labels.dtype) == (torch.uint8, torch.int64)


def test_images_of_every_size_and_mode_become_the_same_small_picture(photos: Path):
    for shape in [(3, 32, 32), (1, 24, 40)]:
        found = read_labelled(photos, shape)
        assert found.classes == ["china", "flower"]
        assert found.labels.tolist() == [0] * 8 + [1] * 8
        assert found.inputs.shape == (16, *shape)
        grey = found.inputs.double().mean(1)
        for first in (0, 8):  # 16 bits cut off at 255 or a palette taken for grey would be far away
            away = (grey[first : first + 8] - grey[first]).abs().mean((1, 2)).numpy()
            assert np.all(away < [6] * 7 + [25])  # one bit is coarser
    assert torch.equal(read_labelled(photos).inputs, read_labelled(photos, (3, 32, 32)).inputs)


def test_transparent_is_white_and_the_camera_s_rotation_is_undone(tmp_path: Path):
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(tmp_path / "clear.png")  # black, fully transparent
    sideways = Image.fromarray(np.repeat(np.array([[255], [0]], np.uint8), 4, 0).repeat(8, 1))  # white above black
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter: white goes right
    sideways.save(tmp_path / "turned.png", exif=exif)
    inputs, names = read_inputs([tmp_path], {"kind": "image", "shape": [1, 8, 8]})
    assert names == ["clear.png", "turned.png"]
    assert inputs[0].unique().tolist() == [255]
    assert inputs[1, 0, 0].tolist() == [0] * 4 + [255] * 4


def test_mnist_from_parquet_is_the_library_s_own_mnist(mirror: Path, mnist):
    file = next((mirror / "ylecun/mnist/mnist").glob("test-*.parquet"))
    found = read_labelled(file, (1, 28, 28))
    assert torch.equal(found.inputs, mnist.test.images)
    assert torch.equal(found.labels, mnist.test.labels)
    assert found.classes == [str(digit) for digit in range(10)]
    std, mean = torch.std_mean(mnist.test.images.double() / 255, correction=0)
    how = scaling(found.inputs)
    assert (how["scale"], *how["mean"], *how["std"]) == pytest.approx((1 / 255, float(mean), float(std)), rel=1e-12)


def test_the_parquet_s_own_names_are_kept_in_their_order_for_the_classes_that_occur(write_parquet, tmp_path: Path):
    names = ["fish", "cow", "bee"]
    file = write_parquet(tmp_path / "a.parquet", list(PIXELS[:4]), [2, 0, 0, 2], names, ("img", "fine"))
    found = read_labelled(file, (1, 8, 8))
    assert (found.classes, found.labels.tolist()) == (["fish", "bee"], [1, 0, 0, 1])
    again = read_labelled(file, (1, 8, 8), classes=["bee", "fish"])
    assert (again.classes, again.labels.tolist()) == (["bee", "fish"], [0, 1, 1, 0])
    assert torch.equal(found.inputs, read_inputs([file], found.recipe)[0])


def test_the_same_table_from_csv_and_parquet_is_the_same(tmp_path: Path):
    wine = load_wine()
    found = read_labelled(csv_file(tmp_path / "wine.csv", wine), label="kind")
    assert torch.equal(found.inputs, torch.from_numpy(wine.data).float())
    assert torch.equal(found.labels, torch.from_numpy(wine.target))
    assert found.classes == ["class_0", "class_1", "class_2"]
    assert found.recipe == {"kind": "table", "shape": [13], "columns": wine.feature_names}
    columns = dict(zip(wine.feature_names, wine.data.T, strict=True))
    table = pa.table({"__index_level_0__": range(178), "label": wine.target_names[wine.target], **columns})
    pq.write_table(table, tmp_path / "wine.parquet")
    other = read_labelled(tmp_path / "wine.parquet", (13,))
    assert torch.equal(found.inputs, other.inputs)
    assert torch.equal(found.labels, other.labels)


def test_columns_in_another_order_and_extra_ones_are_read_by_the_recipe(tmp_path: Path):
    iris = load_iris()
    first = read_labelled(csv_file(tmp_path / "a.csv", iris), label="kind")
    file = csv_file(tmp_path / "b.csv", iris, order=[2, 0, 3, 1])
    inputs, names = read_inputs([file], json.loads(json.dumps(first.recipe)))
    assert torch.equal(inputs, first.inputs)
    assert names[::149] == ["b.csv:2", "b.csv:151"]  # the lines an editor shows
    more = read_labelled(file, label="kind", classes=first.classes, recipe=first.recipe)
    assert torch.equal(more.inputs, first.inputs)
    assert torch.equal(more.labels, first.labels)


def test_csv_with_semicolons_a_mark_a_pandas_index_blank_lines_and_number_labels(tmp_path: Path):
    (tmp_path / "a.csv").write_text('\ufeff;"size; cm";y\n0;1;10\n\n1;2.5;9.0\n2; 1e3 ;10\n', encoding="utf-8")
    found = read_labelled(tmp_path / "a.csv", label="y")
    assert found.recipe["columns"] == ["size; cm"]
    assert found.inputs.tolist() == [[1], [2.5], [1000]]
    assert (found.classes, found.labels.tolist()) == (["9", "10"], [1, 0, 1])


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels"), ("data", "target"), ("pictures", "digit")])
def test_arrays_under_many_names_stay_as_they_are(names: tuple[str, str], tmp_path: Path):
    np.savez_compressed(tmp_path / "a.npz", **{names[0]: DIGITS.images, names[1]: DIGITS.target, "other": np.ones(3)})
    np.save(tmp_path / "x.npy", DIGITS.images)
    np.save(tmp_path / "y.npy", DIGITS.target_names[DIGITS.target].astype(str))
    one = read_labelled(tmp_path / "a.npz")
    two = read_labelled(tmp_path / "x.npy", labels=tmp_path / "y.npy")
    for found in (one, two):
        assert torch.equal(found.inputs, torch.from_numpy(DIGITS.images).float())
        assert torch.equal(found.labels, torch.from_numpy(DIGITS.target))
        assert found.recipe == {"kind": "array", "shape": [8, 8], "dtype": "float32"}
    assert torch.equal(read_inputs([tmp_path / "x.npy"], one.recipe)[0], one.inputs)


def test_arrays_of_pixels_are_images_however_their_channels_lie(tmp_path: Path, digits: Path):
    np.savez(tmp_path / "grey.npz", x=PIXELS, y=DIGITS.target)
    np.savez(tmp_path / "last.npz", x=PIXELS[..., None].repeat(3, -1), y=DIGITS.target)
    grey, last = (read_labelled(tmp_path / name) for name in ("grey.npz", "last.npz"))
    assert torch.equal(grey.inputs, torch.from_numpy(PIXELS)[:, None])
    assert torch.equal(last.inputs, grey.inputs.expand(-1, 3, -1, -1))
    inputs, names = read_inputs([digits / "8", digits / "9/009.png"], grey.recipe)
    assert (names[0], names[-1]) == ("008.png", "009.png")
    assert torch.equal(inputs[-1, 0], torch.from_numpy(PIXELS[9]))


def test_tokens_stay_whole_numbers_and_are_not_scaled(tmp_path: Path):
    np.savez(tmp_path / "a.npz", inputs=np.arange(12).reshape(4, 3), labels=np.array([0, 1, 1, 0]))
    found = read_labelled(tmp_path / "a.npz")
    assert (found.inputs.dtype, scaling(found.inputs)) == (torch.int64, {})
    assert scaled(found.inputs, {}) is found.inputs


def test_scaling_survives_json_and_standardises_what_it_was_computed_on(photos: Path):
    table = torch.from_numpy(load_wine().data).float()
    table[:, 3] = 7.3
    for inputs, axes in [(table, 0), (read_labelled(photos).inputs, (0, 2, 3))]:
        how = json.loads(json.dumps(scaling(inputs)))
        out = scaled(inputs, how)
        assert out.dtype == torch.float32
        assert out.mean(axes).abs().max() < 1e-4
        spread = out.std(axes, correction=0)
        assert torch.all((spread - 1).abs().lt(1e-3) | spread.eq(0))
        assert torch.equal(scaled(inputs[:3], how), out[:3])
    assert scaled(table, scaling(table))[:, 3].abs().max() == 0
    with pytest.raises(InputError, match=r"\[178, 12\], their scaling is for \[N, 13"):
        scaled(table[:, 1:], scaling(table))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 0.99), st.integers(0, 9))
def test_every_row_is_in_one_part_and_every_class_keeps_one_for_training(labels, share: float, seed: int):
    held_labels = torch.tensor(labels)
    train, validation = hold_out(held_labels, share, seed)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(len(labels)))
    for label in set(labels):
        count, held = labels.count(label), int((held_labels[validation] == label).sum())
        assert held == (min(max(round(share * count), 1), count - 1) if share else 0)
    assert all(map(torch.equal, hold_out(held_labels, share, seed), (train, validation)))


def test_a_hundred_thousand_rows_take_about_a_second(tmp_path: Path):
    wine = load_wine()
    file = csv_file(tmp_path / "wine.csv", wine)
    header, _, body = file.read_text().partition("\n")
    file.write_text(header + "\n" + body * 562)
    start = time.perf_counter()
    assert len(read_labelled(file, label="kind").inputs) == 178 * 562
    assert time.perf_counter() - start < 5  # on a busy machine


def test_a_photo_of_twelve_megapixels_passes_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7_000_000)  # where PIL starts to warn
    photo = Image.fromarray(load_sample_images().images[0]).resize((4000, 3000))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        photo.save(tmp_path / name / "photo.jpg", quality=60)
    with warnings.catch_warnings(action="error"):
        assert read_labelled(tmp_path).inputs.shape == (2, 3, 32, 32)


@pytest.mark.parametrize(("width", "height"), [(20000, 20000), (11000, 9200), (9600, 9500), (2000, 2000)])
def test_a_bomb_is_refused_by_its_header(width: int, height: int, tmp_path: Path):
    (tmp_path / "bomb.png").write_bytes(huge_png(width, height))
    with warnings.catch_warnings(action="error"), pytest.raises(DataError, match=r"bomb\.png: .*smaller$"):
        read_inputs([tmp_path / "bomb.png"], {"kind": "image", "shape": [3, 32, 32]})


def refused(message: str, path: Path, kind: type[ExssnetError] = DataError, **options) -> None:
    with pytest.raises(kind) as caught:
        read_labelled(path, **options)
    assert message in str(caught.value)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line is empty"),
        ("a,b,y\n", "no rows"),
        ("y\n1\n2\n", "no column besides the label 'y'"),
        ("a,a,y\n1,2,0\n", "column 'a' occurs more than once"),
        ("a,b,z\n1,2,3\n", "no column 'y'; it has a, b, z"),
        ("a,b,y\n1,2,0\n1,2\n", "line 3: 2 cells, but the header has 3 columns"),
        (
            "a,b,y\n1,2,0\n1,red,1\n",
            "line 3, column 'b': 'red' is not a number, text is not supported; encode this column",
        ),
        ("a,b,y\n1,2,0\n1,,1\n", "line 3, column 'b': is empty"),
        ("a,b,y\n1,2,0\nnan,2,1\n", "line 3, column 'a': is nan"),
        ("a,b,y\n1,1e99,0\n1,2,1\n", "line 2, column 'b': is inf"),
        ("a,b,y\n1,2,0\n1,2,1.5\n", "line 3: label 1.5 is not a whole number"),
        ("a,b,y\n1,2,0\n1,2,\n", "line 3: the label is empty"),
        ("a,b,y\n1,2,u\n1,2,u\n", "all labels are 'u'"),
        ("a,b,y\n1,2,0\n1,\xff,1\n", "not UTF-8"),
        ("a,b,y\n1,2,0\n1," + "7" * 200_000 + ",1\n", "line 3: not readable as CSV"),
    ],
)
def test_a_wrong_csv_is_refused_by_line_and_column(text: str, message: str, tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    refused(message, tmp_path / "a.csv", label="y")


def test_a_csv_needs_the_name_of_its_label_and_the_width_of_the_network(tmp_path: Path):
    file = csv_file(tmp_path / "iris.csv", load_iris())
    refused("--label), one of kind, sepal length (cm)", file, InputError)
    refused("4 columns besides the label 'kind', the network needs [9]", file, label="kind", shape=(9,))
    refused("line 102: label 'virginica' is not one of", file, label="kind", classes=["setosa", "versicolor"])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": ["x", "y"], "label": [0, 1]}, "column 'a': holds string, text is not supported; encode this column"),
        ({"a": [1, None], "label": [0, 1]}, "row 1, column 'a': is empty"),
        ({"a": [1.0, float("nan")], "label": [0, 1]}, "row 1, column 'a': is nan"),
        ({"a": [1, 2], "label": [0, None]}, "row 1: the label is empty"),
        ({"a": [1, 2], "label": [0, 0.5]}, "row 1: label 0.5 is not a whole number"),
        ({"a": [1, 2], "label": [[0], [1]]}, "row 0: the label [0] is a list"),
        ({"a": pa.array([], pa.int64()), "label": pa.array([], pa.int64())}, "no rows"),
    ],
)
def test_a_wrong_parquet_is_refused_by_row_and_column(columns: dict, message: str, tmp_path: Path):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    refused(message, tmp_path / "a.parquet")


def test_wrong_images_in_a_parquet_are_refused_by_row(write_parquet, tmp_path: Path):
    file = write_parquet(tmp_path / "a.parquet", [PIXELS[0], None, b"no image"], [0, 1, 1], columns=("image", "y"))
    refused("--label), one of image, y", file, InputError)
    refused("no column 'z'; it has image, y", file, label="z")
    refused("row 1: no image bytes", file, label="y")
    write_parquet(file, [PIXELS[0], b"no image"], [0, 3], names=["a", "b"])
    refused("row 1: label 3 is not in 0 to 1", file)
    file.write_bytes(b"")
    refused("not readable as parquet", file)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((3, 2)), "y": np.array([0, 1])}, "inputs 'x' are 3, labels 'y' 2"),
        ({"x": np.ones((2, 2)), "y": np.array([0, 1.5])}, "row 1: label 1.5 is not a whole number"),
        ({"x": np.ones((2, 2)), "y": np.eye(2)}, "the labels 'y' have shape [2, 2]"),
        ({"x": np.full((2, 2), np.nan), "y": np.array([0, 1])}, "input 0 has NaN"),
        ({"x": np.array([{}, {}]), "y": np.array([0, 1])}, "never unpickled"),
        ({"x": np.ones((2, 2), np.int16), "y": np.array([0, 1])}, "inputs are torch.int16"),
        ({"a": np.ones((2, 2)), "b": np.ones((2, 2)), "c": np.array([0, 1])}, "inputs and labels are ambiguous"),
        ({}, "has no arrays"),
    ],
)
def test_wrong_arrays_are_refused(arrays: dict, message: str, tmp_path: Path):
    np.savez(tmp_path / "a.npz", **arrays)
    refused(message, tmp_path / "a.npz")


def test_wrong_numpy_files_are_refused(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.ones((2, 5)))
    np.save(tmp_path / "y.npy", np.array([0, 1]))
    refused("give a second .npy file of labels (--labels)", tmp_path / "x.npy", InputError)
    with pytest.raises(DataError, match=r"z\.npy: no such file"):
        read_labelled(tmp_path / "x.npy", labels=tmp_path / "z.npy")
    refused("[2, 5], the network needs [N, 4]", tmp_path / "x.npy", labels=tmp_path / "y.npy", shape=(4,))
    (tmp_path / "a.npz").write_bytes(b"")
    refused("not readable as a NumPy file", tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"something else")
    refused("is not a NumPy file", tmp_path / "a.npz")


def test_wrong_folders_are_refused(tmp_path: Path, digits: Path):
    refused("no such file", tmp_path / "nowhere")
    refused("unknown type of file '.png'", next(digits.rglob("*.png")))
    refused("no sub-folders", digits / "8")
    refused("its sub-folders are the labels", digits, InputError, label="kind")
    refused("--labels belongs to a .npy file", digits, InputError, labels=digits)
    with pytest.raises(InputError, match=r"images cannot become inputs of shape \[64\]"):
        read_labelled(digits, (64,))


def test_wrong_images_in_a_folder_are_refused_by_name(tmp_path: Path):
    stream = BytesIO()
    Image.fromarray(load_sample_images().images[0]).save(stream, "JPEG")
    cats, dogs = tmp_path / "animals/cats", tmp_path / "animals/dogs"
    cats.mkdir(parents=True)
    refused("cats: no images", cats.parent)
    (cats / "tom.jpg").write_bytes(stream.getvalue())
    refused("all labels are 'cats'", cats.parent)
    dogs.mkdir()
    (dogs / "rex.jpg").write_bytes(stream.getvalue()[:9000])
    refused("dogs/rex.jpg: the image cannot be read", cats.parent)
    refused("rex.jpg: label 'dogs' is not one of the learned classes cats, cows", cats.parent, classes=["cats", "cows"])
    (dogs / "rex.jpg").write_text("woof")
    refused("dogs/rex.jpg: is not a supported image", cats.parent)
    (dogs / "rex.heic").write_text("woof")
    refused("dogs/rex.heic: .heic images cannot be read; convert", cats.parent)


def test_prediction_from_another_kind_of_file_is_refused(tmp_path: Path, digits: Path):
    numbers = read_labelled(csv_file(tmp_path / "iris.csv", load_iris()), label="kind")
    np.save(tmp_path / "x.npy", PIXELS[:, None] / 255)
    with pytest.raises(DataError, match=r"8: the task was learned from a table"):
        read_inputs([digits / "8"], numbers.recipe)
    with pytest.raises(DataError, match=r"inputs are float32, but the task was learned from uint8"):
        read_inputs([tmp_path / "x.npy"], read_labelled(digits, (1, 8, 8)).recipe)
    with pytest.raises(DataError, match=r"no column 'sepal length \(cm\)'; it has"):
        read_inputs([csv_file(tmp_path / "wine.csv", load_wine())], numbers.recipe)
    with pytest.raises(DataError, match=r"has images, but the task was learned from a table"):
        read_labelled(digits, recipe=numbers.recipe | {"shape": [3, 8, 8]})
    with pytest.raises(InputError, match="give at least one"):
        read_inputs([], numbers.recipe)
