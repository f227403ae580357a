"""A user's own texts: columns of CSV, JSON lines and Parquet; what is wrong is one line."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exssnet.data.files.texts import Columns, read_texts
from exssnet.errors import DataError, ExssnetError, InputError

ROWS = [
    {"title": "Lost parcel", "body": 'It said "sent",\nnever came', "team": "post", "n": 1},
    {"title": "", "body": "Здравствуйте, где мой заказ?", "team": "post", "n": 2},
    {"title": "退款", "body": "", "team": "money", "n": 3},
    {"title": "Refund 🙂", "body": "please", "team": "money", "n": 4},
]


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(params=[".csv", ".jsonl", ".parquet"])
def file(request, tmp_path):
    return write(tmp_path / f"tickets{request.param}", ROWS)


def test_texts_and_labels_are_those_of_the_columns(file):
    found, classes = read_texts(file, Columns(("body",), "team"))
    assert found.texts == [row["body"] for row in ROWS]
    assert classes == ["money", "post"]
    assert found.labels.tolist() == [1, 1, 0, 0]


def test_several_columns_are_joined_and_a_pair_stays_a_pair(file):
    found, _ = read_texts(file, Columns(("title", "body"), "team"))
    assert found.texts[:3] == ['Lost parcel It said "sent",\nnever came', ROWS[1]["body"], "退款"]
    pair, _ = read_texts(file, Columns(("title", "body"), "team", pair=True))
    assert pair.texts == [(row["title"], row["body"]) for row in ROWS]


def test_empty_texts_are_kept_and_counted(file):
    found, _ = read_texts(file, Columns(("body",), "team"))
    assert found.empty == 1
    assert len(found) == 4


def test_labels_keep_the_numbers_that_a_task_gave_them(file):
    found, classes = read_texts(file, Columns(("body",), "team"), ["post", "none", "money"])
    assert classes == ["post", "none", "money"]
    assert found.labels.tolist() == [0, 0, 2, 2]


def test_a_label_outside_the_classes_is_refused_by_its_place(file):
    place = {".csv": "line 5", ".jsonl": "line 3", ".parquet": "row 2"}[file.suffix]
    with pytest.raises(DataError, match=rf"{place}: label 'money' is not one of"):
        read_texts(file, Columns(("body",), "team"), ["post", "other"])


@pytest.mark.parametrize("columns", [Columns(("text",), "team"), Columns(("body",), "tema")])
def test_no_such_column_names_those_that_are_there(file, columns):
    with pytest.raises(DataError, match=r"no column '(text|tema)'; it has title, body, team, n"):
        read_texts(file, columns)


def test_all_rows_of_one_class_are_refused(tmp_path, file):
    same = write(tmp_path / f"same{file.suffix}", ROWS[:2])
    with pytest.raises(DataError, match=r"all labels are 'post'"):
        read_texts(same, Columns(("body",), "team"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_numbers_are_no_text(tmp_path, suffix):
    with pytest.raises(DataError, match="column 'n': is a int, not text"):
        read_texts(write(tmp_path / f"a{suffix}", ROWS), Columns(("n",), "team"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"", "first line is empty"),
        ("a.csv", b"body,team\n", "no rows"),
        ("a.csv", b"body,team\none,x,y\n", "line 2: 3 cells"),
        ("a.csv", "body,team\nGrüße,x\n".encode("latin-1"), "not UTF-8"),
        ("a.csv", "body,team\nhello,x\n".encode("utf-16"), "not UTF-8"),
        ("a.csv", b"body,team\n\x00\x01\x02,x\nb,y\n", "NUL"),
        ("a.csv", b"\x89PNG\r\n\x1a\n\x00\x00", "not UTF-8"),
        ("a.csv", b'body,team\n"never closed,x\n', "1 cells"),
        ("a.csv", b"body,body\na,b\n", "more than once"),
        ("a.csv", b"body,team\nhello,\n", "label is empty"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"{not json}\n", "line 1: is not JSON"),
        ("a.jsonl", b'{"body": "a", "team": "x"}\n[1]\n', "line 2: is a list"),
        ("a.jsonl", b'{"body": "a", "team": "x"}\n{"team": "x"}\n', "line 2: no column 'body'"),
        ("a.jsonl", b'{"body": ["a"], "team": "x"}\n{"body": "b", "team": "y"}\n', "line 1, column 'body': is a list"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "is not JSON"),
        ("a.parquet", b"", "parquet"),
        ("a.parquet", b"PAR1 nothing", "parquet"),
        ("a.txt", b"hello", "unknown kind"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_a_line(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ExssnetError, match=says) as refused:
        read_texts(path, Columns(("body",), "team"))
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused_in_a_line(tmp_path):
    for suffix in (".csv", ".jsonl", ".parquet"):
        with pytest.raises(ExssnetError):
            read_texts(tmp_path / f"none{suffix}", Columns(("body",), "team"))


@pytest.mark.parametrize(
    ("text", "label", "pair"), [((), "a", False), (("a",), "b", True), (("a", "a"), "b", False), (("a",), "a", False)]
)
def test_columns_that_make_no_sense_are_refused(text, label, pair):
    with pytest.raises(InputError):
        Columns(text, label, pair)


texts_of_any_kind = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=30)


@given(st.lists(texts_of_any_kind, min_size=1))
def test_any_text_survives_csv(tmp_path_factory, texts):
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["body", "team"])
    rows = [*texts, "one", "two"]
    writer.writerows((text, f"class {at % 2}") for at, text in enumerate(rows))
    path = tmp_path_factory.mktemp("any") / "a.csv"
    path.write_text(stream.getvalue(), "utf-8", newline="")
    assert read_texts(path, Columns(("body",), "team"))[0].texts == rows
