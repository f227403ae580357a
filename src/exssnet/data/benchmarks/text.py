"""WebNLP and GLUE: text data sets by hub id and column, and the paper's orders S1 to S8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from exssnet.data.benchmarks.hub import parquet_files
from exssnet.data.files.texts import read_parquet_texts
from exssnet.data.text.stream import TextStream, TextTask
from exssnet.data.text.texts import Sample, Texts, some
from exssnet.errors import DataError, unknown

if TYPE_CHECKING:
    from exssnet.encoders import Encoder

WEBNLP_TRAIN, WEBNLP_TEST, WEBNLP_VALIDATION = 115_000, 7_600, 500  # the latter a class


@dataclass(frozen=True)
class TextSource:
    """One data set. Columns and splits have the hub's own names, labels the hub's order."""

    hub_id: str
    classes: int
    columns: tuple[str, ...]  # joined by a space, or the two of a pair
    rows: tuple[int, int]  # of the whole data set: train and test split
    pair: bool = False
    label: str = "label"
    config: str | None = None
    test_split: str = "test"
    train_split: str = "train"
    shared: str = ""  # data sets that name the same have the same classes


SOURCES = {
    "ag": TextSource("fancyzhx/ag_news", 4, ("text",), (120_000, 7_600)),
    "yelp": TextSource("Yelp/yelp_review_full", 5, ("text",), (650_000, 50_000), shared="stars"),
    "amazon": TextSource("amazon_review_full", 5, ("text",), (3_000_000, 650_000), shared="stars"),
    "yahoo": TextSource(
        "community-datasets/yahoo_answers_topics",
        10,
        ("question_title", "question_content", "best_answer"),
        (1_400_000, 60_000),
        label="topic",
    ),
    "dbpedia": TextSource("fancyzhx/dbpedia_14", 14, ("title", "content"), (560_000, 70_000)),
}
_GLUE = {
    "mnli": (3, ("premise", "hypothesis"), (392_702, 9_815), "validation_matched"),
    "qqp": (2, ("question1", "question2"), (363_846, 40_430), "validation"),
    "qnli": (2, ("question", "sentence"), (104_743, 5_463), "validation"),
    "sst2": (2, ("sentence",), (67_349, 872), "validation"),
    "cola": (2, ("sentence",), (8_551, 1_043), "validation"),
}
for _name, (_classes, _columns, _rows, _test) in _GLUE.items():
    SOURCES[_name] = TextSource(
        "nyu-mll/glue", _classes, _columns, _rows, pair=len(_columns) == 2, config=_name, test_split=_test
    )

SEQUENCES = {
    "glue-s1": ("mnli", "qqp", "qnli", "sst2", "cola"),
    "webnlp-s2": ("ag", "yelp", "amazon", "yahoo", "dbpedia"),
    "webnlp-s3": ("yelp", "yahoo", "amazon", "dbpedia", "ag"),
    "webnlp-s4": ("dbpedia", "yahoo", "ag", "amazon", "yelp"),
    "webnlp-s5": ("yelp", "ag", "dbpedia", "amazon", "yahoo"),
    "webnlp-s6": ("ag", "yelp", "yahoo"),
    "webnlp-s7": ("yelp", "yahoo", "ag"),
    "webnlp-s8": ("yahoo", "ag", "yelp"),
}


def text_stream(sequence: str, encoder: Encoder, tasks: int, sample: int | None, validation: float) -> TextStream:
    """The first tasks of a sequence.

    `sample`: training rows a class, and as many for validation where there are enough; None: the paper's full sizes.
    `validation`: share of each class that is held out at least; 0: none.
    """
    if sequence not in SEQUENCES:
        raise unknown("sequence", sequence, SEQUENCES)
    names = SEQUENCES[sequence][:tasks]
    return TextStream(sequence, tuple(text_tasks(names, sample, validation)), encoder)


def text_tasks(names: Sequence[str], sample: int | None, validation: float) -> list[TextTask]:
    """The tasks of some data sets in order. Classes are numbered through; those of the star ratings are shared."""
    first: dict[str, int] = {}
    starts = accumulate((SOURCES[name].classes for name in _distinct(names)), initial=0)
    for name, start in zip(_distinct(names), starts, strict=False):
        first[SOURCES[name].shared or name] = start
    found = []
    for name in names:
        source = SOURCES[name]
        train, test, class_names = _read(name)
        glue = source.config is not None
        if not glue:
            test = some(test, WEBNLP_TEST, name)
        cut = Sample(
            sample if sample or glue else -(-WEBNLP_TRAIN // source.classes),
            sample or (None if glue else WEBNLP_VALIDATION),
            validation,
        )
        kept, held = cut.cut(train, source.classes, name)
        start = first[source.shared or name]
        numbers = tuple(range(start, start + source.classes))
        found.append(TextTask(name, class_names, numbers, kept, test, held))
    return found


def _distinct(names: Sequence[str]) -> list[str]:
    """One name of each set of classes, in order."""
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(SOURCES[name].shared or name, name)
    return list(kinds.values())


@cache
def _read(name: str) -> tuple[Texts, Texts, tuple[str, ...]]:
    """Train and test split of a data set as they are here, and the names of its classes."""
    source = SOURCES[name]
    splits = []
    names: tuple[str, ...] = ()
    for split, full in zip((source.train_split, source.test_split), source.rows, strict=True):
        texts: list[Texts] = []
        for file in parquet_files(source.hub_id, split, source.config):
            found, names = read_parquet_texts(file, source.columns, source.label, source.pair, source.classes)
            texts.append(found)
        splits.append(_whole(texts, full))
    if not all(len(split) for split in splits):
        raise DataError(f"{source.hub_id}: a split of it has no rows; complete the mirror, or unset EXSSNET_DATA")
    return splits[0], splits[1], names


def _whole(parts: Sequence[Texts], full: int) -> Texts:
    import torch

    texts = [text for part in parts for text in part.texts]
    labels = torch.cat([part.labels for part in parts])
    return Texts(texts, labels, full if len(texts) < full else None)
