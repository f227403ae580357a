"""Names, cells and paths that mean harm or nothing: one plain line says so, and nothing is read as what it is not."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from exssnet.data.files.labelled import read_inputs, read_labelled
from exssnet.errors import DataError, ExssnetError

EVIL = "a\x1b[2J\nb\r\x9b\u202e"  # clears the screen, forges a line, turns the writing around
IMAGES = {"kind": "image", "shape": [1, 8, 8]}


def table(file: Path, cells: list[str], labels: tuple[str, str] = ("u", "v")) -> Path:
    file.write_text("x,y\n" + "".join(f'"{cell}",{labels[row % 2]}\n' for row, cell in enumerate(cells)), "utf-8")
    return file


@pytest.mark.parametrize("cell", ["10", "+10", "10.", "1e1", ".1E+2", "0010.0", " 10\t"])
def test_plain_decimal_numbers_are_numbers_also_with_spaces_around(cell: str, tmp_path: Path):
    found = read_labelled(table(tmp_path / "a.csv", ["10", cell]), label="y")
    assert found.inputs.tolist() == [[10], [10]]


@pytest.mark.parametrize("cell", ["1_0", "1_0.5", "1e1_0", "１０", "٣", "\xa010", "−10", "0x10", "1 0", "1,0"])
def test_what_only_python_or_another_script_takes_for_a_number_is_text(cell: str, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        read_labelled(table(tmp_path / "a.csv", ["10", cell]), label="y")
    assert f"line 3, column 'x': {cell!r} is not a number" in str(caught.value)


@pytest.mark.parametrize(("cell", "told"), [("nan", "nan"), (" -Infinity ", "-inf"), ("INF", "inf"), ("1e400", "inf")])
def test_what_is_not_finite_is_refused_by_its_place(cell: str, told: str, tmp_path: Path):
    with pytest.raises(DataError, match=f"line 3, column 'x': is {told} in float32"):
        read_labelled(table(tmp_path / "a.csv", ["10", cell]), label="y")


@example("1_0")
@example("１０")
@given(st.text(st.sampled_from("0123456789+-.eE_ ٣１\xa0\tx"), min_size=1, max_size=6))
def test_a_cell_counts_as_a_number_exactly_where_it_is_written_in_plain_digits(
    tmp_path_factory: pytest.TempPathFactory, cell: str
):
    plain = re.fullmatch(r"[ \t]*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*", cell)
    file = table(tmp_path_factory.getbasetemp() / "cell.csv", ["1", cell])
    if plain and abs(float(cell)) < float(np.finfo(np.float32).max):
        assert read_labelled(file, label="y").inputs[1, 0].item() == np.float32(float(cell))
    else:
        with pytest.raises(DataError, match="is inf in float32|is -inf in" if plain else r"is not a number|is empty"):
            read_labelled(file, label="y")


def test_labels_that_are_no_plain_numbers_keep_their_names(tmp_path: Path):
    found = read_labelled(table(tmp_path / "a.csv", list("1234"), ("1_0", "2")), label="y")
    assert found.classes == ["1_0", "2"]  # as text; not 10, which may be another class
    found = read_labelled(table(tmp_path / "a.csv", list("1234"), ("１０.0", "2")), label="y")
    assert found.classes == ["2", "１０.0"]


def evil_folder(place: Path) -> None:
    for name in ("good", EVIL):
        (place / name).mkdir()
        Image.new("L", (8, 8)).save(place / name / "a.png")
    read_labelled(place)


def evil_image_name(place: Path) -> None:
    (place / f"{EVIL}.png").write_text("no image")
    read_inputs([place], IMAGES)


def evil_path(place: Path) -> None:
    read_labelled(place / EVIL)


def evil_suffix(place: Path) -> None:
    (place / f"a.{EVIL}").write_text("")
    read_labelled(place / f"a.{EVIL}")


def evil_parts(place: Path) -> None:
    (place / EVIL / "train").mkdir(parents=True)
    read_labelled(place / EVIL)


def evil_header(place: Path) -> None:
    (place / "a.csv").write_text(f'"{EVIL}",y\n1,u\nx,v\n', "utf-8")
    read_labelled(place / "a.csv", label="y")


def evil_columns(place: Path) -> None:
    (place / "a.csv").write_text(f'"{EVIL}",y\n1,u\n2,v\n', "utf-8")
    read_labelled(place / "a.csv")


def evil_cell(place: Path) -> None:
    (place / "a.csv").write_text(f'x,y\n"{EVIL}",u\n', "utf-8")
    read_labelled(place / "a.csv", label="y")


def evil_label(place: Path) -> None:
    (place / "a.csv").write_text(f'x,y\n1,u\n2,"{EVIL}"\n', "utf-8")
    read_labelled(place / "a.csv", label="y")


def evil_wanted_label(place: Path) -> None:
    read_labelled(table(place / "a.csv", ["1", "2"]), label=EVIL)


def evil_known_class(place: Path) -> None:
    read_labelled(table(place / "a.csv", ["1", "2"]), label="y", classes=["v", EVIL])


def evil_parquet(place: Path) -> None:
    pq.write_table(pa.table({EVIL: ["x", "y"], "label": [0, 1]}), place / "a.parquet")
    read_labelled(place / "a.parquet")


def evil_parquet_label(place: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2], EVIL: [0, 1]}), place / "a.parquet")
    read_labelled(place / "a.parquet", label="y")


def evil_array(place: Path) -> None:
    np.savez(place / "a.npz", **{EVIL: np.ones((2, 2)), "b": np.ones((2, 2)), "y": np.array([0, 1])})
    read_labelled(place / "a.npz")


@pytest.mark.parametrize(
    "read",
    [
        evil_folder, evil_image_name, evil_path, evil_suffix, evil_parts, evil_header, evil_columns, evil_cell,
        evil_label, evil_wanted_label, evil_known_class, evil_parquet, evil_parquet_label, evil_array,
    ],
)  # fmt: skip
def test_no_name_cell_or_label_reaches_the_terminal_unescaped(read: Callable[[Path], None], tmp_path: Path):
    with pytest.raises(ExssnetError) as caught:
        read(tmp_path)
    assert str(caught.value).isprintable()
    assert r"a\x1b[2J\nb\r\x9b\u202e" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, r"x{300}: cannot be read \(File name too long\)"),
        ("d/" * 3000 + "a.csv", r"a\.csv: cannot be read \(File name too long\)"),
        ("a\0b.csv", r"a\\x00b\.csv: no such file or folder"),
        ("\ud800.csv", r"\\ud800\.csv: no such file or folder"),
        ("file/below.csv", r"below\.csv: no such file or folder"),
        ("loop", r"loop: cannot be read \(Too many levels"),
    ],
)
def test_a_path_that_cannot_be_is_one_line(name: str, message: str, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    np.save(tmp_path / "x.npy", np.ones((2, 5)))
    for read in (
        lambda: read_labelled(tmp_path / name, label="y"),
        lambda: read_labelled(tmp_path / "x.npy", labels=tmp_path / name),
        lambda: read_inputs([tmp_path / name], IMAGES),
    ):
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert str(caught.value).isprintable()


def test_the_home_of_nobody_is_no_place():
    with pytest.raises(DataError, match=r"^~nobody-of-this-name/a\.csv: no such file or folder"):
        read_labelled(Path("~nobody-of-this-name/a.csv"), label="y")


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "a.npy", "a.parquet", "a.png"])
def test_a_folder_in_the_place_of_a_file_is_one_line(name: str, tmp_path: Path):
    (tmp_path / name).mkdir()
    np.save(tmp_path / "x.npy", np.ones((2, 5)))
    tables = {"kind": "table", "shape": [1], "columns": ["x"]}
    arrays = {"kind": "array", "shape": [5], "dtype": "float32"}
    for read, message in [
        (lambda: read_labelled(tmp_path / name, label=None), "no sub-folders"),
        (
            lambda: read_labelled(tmp_path / "x.npy", labels=tmp_path / name),
            "is a folder: a regular file was",
        ),
        (lambda: read_inputs([tmp_path / name], IMAGES), "no images"),
        (lambda: read_inputs([tmp_path / name], tables), "learned from a table; give a .csv"),
        (lambda: read_inputs([tmp_path / name], arrays), "learned from float32 arrays; give them as a .npy"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("train", "val"), "give {}/train to learn, and {}/val to evaluate"),
        (("test", "train"), "give {}/train to learn, and {}/test to evaluate"),
        (("Test", "Training", "val"), "give {}/Training to learn, and {}/Test to evaluate"),
        (("dev", "test", "train", "valid"), "give {}/train to learn, and {}/test to evaluate"),
        (("train",), "give {}/train to learn"),
        (("test",), "give a folder with one sub-folder of images per class"),  # never advised to learn from it
        (("test", "val"), "give a folder with one sub-folder of images per class"),
    ],
)
def test_of_the_parts_of_a_data_set_it_is_said_which_one_to_learn_from(names, advice: str, tmp_path: Path):
    for name in names:
        (tmp_path / name / "cats").mkdir(parents=True)
    with pytest.raises(DataError) as caught:
        read_labelled(tmp_path)
    what = f"its sub-folders are parts of a data set ({', '.join(names)}), not classes"
    assert str(caught.value) == f"{tmp_path}: {what}; {advice.format(tmp_path, tmp_path)}"


def test_images_of_several_folders_have_names_of_their_own(tmp_path: Path):
    for folder in ("a/new", "b/new", "c"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / folder / "0.png")
    both = [tmp_path / "a/new", tmp_path / "b/new"]
    assert read_inputs(both, IMAGES)[1] == [f"{both[0]}/0.png", f"{both[1]}/0.png"]
    assert read_inputs([both[0], tmp_path / "c"], IMAGES)[1] == ["new/0.png", "c/0.png"]
    assert read_inputs([tmp_path / "c"], IMAGES)[1] == ["0.png"]
