"""Data that would be waited for without end, or would fill the memory, is refused in a line before it is read."""

import io
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.core.networks import mlp
from tests.store.small import create

from exssnet import Model
from exssnet.data.files.examples import as_data
from exssnet.data.files.labelled import read_inputs, read_labelled
from exssnet.errors import DataError, ExssnetError, InputError

NAMES = ("a.csv", "a.npz", "a.npy", "a.parquet")


def labelled(path: Path):
    """Read as `learn` does."""
    tables = path.suffix in (".csv", ".parquet")
    return read_labelled(path, label="label" if tables else None, labels=path if path.suffix == ".npy" else None)


@pytest.mark.parametrize("name", [*NAMES, "folder"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path):
    pipe = tmp_path / name
    if name == "folder":
        (tmp_path / "folder/a").mkdir(parents=True)
        (tmp_path / "folder/b").mkdir()
        (tmp_path / "folder/b/1.png").write_bytes(b"")
        pipe = tmp_path / "folder/a/1.png"
    os.mkfifo(pipe)
    done = subprocess.run(  # a process of its own: one that waits can be given up
        [sys.executable, "-c", "import sys, pathlib; from tests.data.test_limits import labelled; "
         "labelled(pathlib.Path(sys.argv[1]))", tmp_path / name],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stderr.splitlines()[-1].endswith(f"{pipe} is a FIFO: a regular file was expected")


@pytest.mark.parametrize("name", NAMES)
def test_a_link_to_a_device_is_refused(name: str, tmp_path: Path):
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"{name} is a device: a regular file was expected"):
        labelled(tmp_path / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_larger_than_any_memory_is_refused_by_its_size(name: str, tmp_path: Path):
    with (tmp_path / name).open("wb") as file:
        try:
            file.truncate(10**12)  # takes no room on the disk
        except OSError:
            pytest.skip("needs a file system with sparse files of 1 TB")
    with pytest.raises(DataError, match=r"has 1,000,000,000,000 bytes: at most 32,000,000,000 .* EXSSNET_MAX_GB"):
        labelled(tmp_path / name)


def packed(file: Path, megabytes: int) -> Path:
    """An .npz whose x are so many MB of zeros in a few kilobytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (megabytes, 1000, 1000)}
    )
    labels = io.BytesIO()
    np.save(labels, np.arange(megabytes) % 2)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(megabytes):
                member.write(bytes(10**6))
        archive.writestr("y.npy", labels.getvalue())
    return file


def test_a_packed_array_that_is_far_larger_than_its_file_is_refused(tmp_path: Path):
    file = packed(tmp_path / "a.npz", 1100)
    assert file.stat().st_size < 10**7
    with pytest.raises(DataError, match=r"bytes would unpack to 1\.1 GB, which is implausible.*EXSSNET_MAX_GB"):
        labelled(file)
    with pytest.raises(DataError, match=r"would unpack to 1\.1 GB"):
        read_inputs([file], {"kind": "array", "shape": [1, 8, 8], "dtype": "uint8"})


def test_the_limit_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = packed(tmp_path / "a.npz", 20)
    assert len(labelled(file).labels) == 20
    monkeypatch.setenv("EXSSNET_MAX_GB", "0.01")
    with pytest.raises(DataError, match=r"a\.npz: would take 0\.0 GB of memory; EXSSNET_MAX_GB allows more"):
        labelled(file)
    monkeypatch.setenv("EXSSNET_MAX_GB", "plenty")
    with pytest.raises(InputError, match="EXSSNET_MAX_GB is 'plenty': give a number of gigabytes"):
        labelled(file)


def test_an_array_that_nobody_asked_for_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    x, y = np.ones((4, 3)), np.arange(4) % 2
    np.savez_compressed(tmp_path / "a.npz", x=x, y=y, other=np.zeros((200, 1000, 1000), np.uint8))
    monkeypatch.setenv("EXSSNET_MAX_GB", "0.1")
    assert labelled(tmp_path / "a.npz").inputs.tolist() == x.tolist()


@pytest.mark.parametrize("shape", [(10**9, 10**6), (10**6, 5)])
def test_an_array_that_promises_more_than_its_file_holds_is_refused(shape: tuple[int, ...], tmp_path: Path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    np.save(tmp_path / "y.npy", np.arange(4))
    (tmp_path / "x.npy").write_bytes(header.getvalue() + bytes(64))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.write(tmp_path / "x.npy")
        archive.write(tmp_path / "y.npy")
    for file, labels in ((tmp_path / "x.npy", tmp_path / "y.npy"), (tmp_path / "a.npz", None)):
        with pytest.raises(DataError, match=r"an array \[.*\] of float64 in a file of"):
            read_labelled(file, labels=labels)


def test_an_array_given_twice_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, warnings.catch_warnings(action="ignore"):
        for number in range(2):
            content = io.BytesIO()
            np.save(content, np.full((4, 3), number))
            archive.writestr("x.npy", content.getvalue())
    with pytest.raises(DataError, match=r"has array 'x\.npy' twice"):
        labelled(tmp_path / "a.npz")


@pytest.mark.parametrize("kind", ["table", "labels"])
def test_a_parquet_of_more_rows_than_memory_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    rows, columns = (10**5, 10) if kind == "table" else (10**6, 1)
    table = {f"column {number}": pa.array(np.zeros(rows)) for number in range(columns)}
    pq.write_table(pa.table(table | {"label": np.zeros(rows, np.int64)}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10**5
    monkeypatch.setenv("EXSSNET_MAX_GB", "0.01" if kind == "table" else "0.05")
    with pytest.raises(DataError, match=r"would take 0\.\d GB of memory"):
        labelled(tmp_path / "a.parquet")


def test_images_that_would_become_too_large_an_input_are_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.zeros((64, 8, 8), np.uint8), y=np.arange(64) % 2)
    with pytest.raises(DataError, match=r"would take 64\.0 GB of memory"):
        read_labelled(tmp_path / "a.npz", shape=(1, 31623, 31623))


def test_a_line_without_an_end_is_refused(tmp_path: Path):
    with (tmp_path / "a.csv").open("w") as file:
        file.write("x,label\n1,a\n")
        for _ in range(70):
            file.write(" " * 10**6)
    with pytest.raises(DataError, match="has a line of 67,108,864 characters"):
        labelled(tmp_path / "a.csv")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_thirty_thousand_columns_are_read(tmp_path: Path, kind: str):
    x = np.random.default_rng(0).integers(0, 9, (4, 30_000))
    names = [f"gene {number}" for number in range(30_000)]
    file = tmp_path / f"a.{kind}"
    if kind == "csv":
        file.write_text(
            "\n".join([",".join([*names, "label"]), *(",".join([*map(str, r), "ab"[r[0] % 2]]) for r in x)])
        )
    else:
        pq.write_table(pa.table(dict(zip(names, x.T, strict=True)) | {"label": ["a", "b"] * 2}), file)
    found = labelled(file)
    assert found.recipe["columns"] == names
    assert torch.equal(found.inputs, torch.tensor(x, dtype=torch.float32))
    again = read_inputs([file], found.recipe | {"columns": names[::-1]})[0]
    assert torch.equal(again, found.inputs.flip(1))
    with pytest.raises(ExssnetError, match=r"no column 'genes'; it has gene 0, gene 1, .* and 29,981 more$"):
        read_labelled(file, label="genes")


def test_labels_that_would_make_a_billion_classes_are_refused(tmp_path: Path):
    x, y = np.zeros((4, 12), np.float32), np.array([0, 1, 0, 10**9])
    for learn in (lambda: Model(mlp()).learn("a", (x, y)), lambda: create(tmp_path / "model").learn("a", (x, y))):
        with pytest.raises(InputError, match=r"labels go up to 1,000,000,000, but only 3 different ones occur"):
            learn()
    with pytest.raises(InputError, match=r"labels go up to 1,000,000,000, but only 3 different ones occur: number"):
        as_data((x, y))
    with pytest.raises(InputError, match=r"classes is 1,000,000,001: a task can have up to 1,000,000"):
        as_data((x, y), classes=10**9 + 1)
    assert as_data((x, np.array([0, 1, 0, 900]))).classes == 901  # a part in which most are missing
    assert as_data((x, np.array([0, 1, 0, 2000])), classes=2001).classes == 2001
