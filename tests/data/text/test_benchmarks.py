"""WebNLP and GLUE from the mirror: orders, sizes, labels and pairs as they are published."""

import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.parts import missing

from exssnet.data.benchmarks.text import SEQUENCES, SOURCES, text_stream, text_tasks
from exssnet.data.text.texts import Sample, Texts
from exssnet.encoders import load
from exssnet.errors import DataError, InputError


@pytest.fixture(scope="module")
def texts_mirror(mirror) -> Path:
    if not (mirror / "fancyzhx" / "ag_news").is_dir():
        missing("set EXSSNET_DATA to a folder with the text data sets in the hub's parquet layout")
    return mirror


def test_the_orders_are_the_papers():
    file = Path(os.environ.get("EXSSNET_DATA", ".")).parent / "published.json"
    if not file.exists():
        missing("needs published.json next to the data mirror (EXSSNET_DATA)")
    rows = json.loads(file.read_text())["datasets"]["task-sequences"]["rows"]
    assert {row["column"]: tuple(row["sequence"]) for row in rows} == SEQUENCES


def test_sizes_are_those_of_the_sampled_setting_where_the_mirror_has_enough(texts_mirror):
    """2,000 and 2,000 a class; classes with fewer rows are divided as the share of validation says."""
    ag, yelp, dbpedia = text_tasks(("ag", "yelp", "dbpedia"), 2000, 0.2)
    assert Counter(ag.train.labels.tolist()) == dict.fromkeys(range(4), 2000)
    assert Counter(ag.validation.labels.tolist()) == dict.fromkeys(range(4), 2000)
    assert (len(ag.test), len(dbpedia.test)) == (7600, 7600)
    for task in (yelp, dbpedia):
        train, held = Counter(task.train.labels.tolist()), Counter(task.validation.labels.tolist())
        for label in train:
            assert held[label] == round(0.2 * (train[label] + held[label])) or train[label] == 2000


def test_parts_do_not_share_rows(texts_mirror):
    for task in text_tasks(("ag", "cola"), 300, 0.2):
        whole = Counter(task.train.texts) + Counter(task.validation.texts)
        full = text_tasks((task.name,), None, 0.0)[0].train
        assert not whole - Counter(full.texts)


def test_a_smaller_sample_is_the_beginning_of_a_larger_one_and_no_seed_moves_it(texts_mirror):
    (small,), (large,) = (text_tasks(("ag",), count, 0.2) for count in (100, 500))
    assert large.train.texts[:400] == small.train.texts
    assert large.train.labels[:400].tolist() == small.train.labels.tolist()


def test_labels_are_the_hubs(texts_mirror):
    """Against the parquet read by hand."""
    for name in ("yahoo", "dbpedia", "mnli"):
        source = SOURCES[name]
        folder = texts_mirror / source.hub_id / (source.config or "")
        (file,) = folder.rglob(f"{source.test_split}-*.parquet")
        table = pq.read_table(file)
        names = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"][source.label]["names"]
        (task,) = text_tasks((name,), 10, 0.0)
        assert list(task.class_names) == names
        rows = table.to_pylist()
        assert task.test.labels.tolist() == [row[source.label] for row in rows]
        if source.pair:
            assert task.test.texts == [(row["premise"], row["hypothesis"]) for row in rows]
        else:
            wanted = [" ".join(row[column] for column in source.columns if row[column]) for row in rows]
            assert task.test.texts == wanted


def test_star_ratings_are_the_same_classes_and_all_tasks_together_have_33(texts_mirror):
    tasks = text_tasks(SEQUENCES["webnlp-s2"], 10, 0.0)
    numbers = {task.name: task.numbers for task in tasks}
    assert numbers["yelp"] == numbers["amazon"]
    assert sorted({number for own in numbers.values() for number in own}) == list(range(33))


def test_glue_holds_out_a_tenth_and_tests_on_the_official_validation(texts_mirror):
    (cola,) = text_tasks(("cola",), None, 0.1)
    assert len(cola.test) == 1043
    assert len(cola.train) + len(cola.validation) == 8551
    assert len(cola.validation) == round(0.1 * 2528) + round(0.1 * 6023)
    assert cola.test.of is None  # complete
    assert cola.train.of is None


def test_a_part_of_a_data_set_is_called_a_sample(texts_mirror):
    stream = text_stream("webnlp-s6", load("random:4"), 3, 20, 0.0)
    assert stream.sample
    assert "sample" in stream.data_digests["yelp train"]
    assert "sample" not in stream.data_digests["ag test"]
    assert stream.data_digests["encoder"].endswith("(random:4:0)")
    complete = text_stream("glue-s1", load("random:4"), 5, 20, 0.0)
    assert "sample" not in complete.data_digests["cola train"]


def test_tasks_have_the_names_and_labels_of_the_stream(texts_mirror):
    stream = text_stream("webnlp-s8", load("random:4"), 2, 8, 0.2)
    assert [task.name for task in stream] == ["yahoo", "ag"]
    assert stream.class_order == [list(range(10)), list(range(10, 14))]
    assert stream.max_classes == 10
    task = stream[1]
    assert task.train.classes == 4
    x, y = task.train.batch(torch.arange(3))
    assert x.shape[0] == 3
    assert x.shape[2] == 5
    assert set(y.tolist()) <= {0, 1, 2, 3}
    assert stream.text_counts()["ag train"]["texts"] == 32


# --- the draw ------------------------------------------------------------------------------------------------------


def rows_of(counts: list[int]) -> Texts:
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    return Texts([f"{label} {row}" for row, label in enumerate(labels.tolist())], labels)


@pytest.mark.parametrize(
    ("rows", "most", "share", "train", "held"),
    [
        (4500, 2000, 0.2, 2000, 2000),  # enough of both
        (3000, 2000, 0.2, 2000, 1000),  # training comes first
        (1600, 2000, 0.2, 1280, 320),  # but leaves validation its share
        (433, 2000, 0.2, 346, 87),
        (1600, 2000, 0.0, 1600, 0),
        (100, None, 0.1, 90, 10),
        (2, None, 0.1, 1, 1),
        (1, 5, 0.2, 1, 0),
    ],
)
def test_what_each_part_gets_of_a_class(rows, most, share, train, held):
    kept, aside = Sample(most, most, share).cut(rows_of([rows, 7]), 2, "some")
    assert int((kept.labels == 0).sum()) == train
    assert (0 if aside is None else int((aside.labels == 0).sum())) == held
    assert aside is None or not set(kept.texts) & set(aside.texts)


@pytest.mark.parametrize(("most", "validation"), [(0, 0.0), (-1, 0.0), (5, 1.0), (5, -0.1)])
def test_an_impossible_sample_is_refused(most, validation):
    with pytest.raises(InputError):
        Sample(most, None, validation)


def test_a_mirror_with_other_labels_is_refused_in_a_line(tmp_path, monkeypatch):
    folder = tmp_path / "fancyzhx" / "ag_news" / "data"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 4]}), folder / f"{split}-00000.parquet")
    monkeypatch.setenv("EXSSNET_DATA", str(tmp_path))
    from exssnet.data.benchmarks import text

    text._read.cache_clear()
    with pytest.raises(DataError, match="label 4 is not in 0 to 3"):
        text_tasks(("ag",), None, 0.0)
    text._read.cache_clear()
