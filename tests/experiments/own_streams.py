"""Streams of a user's own, as files."""

import csv
import json
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from tests.data.text.made import TOPICS, texts_of

TASKS = (("sport", "food"), ("space", "sport"))


def text_stream(folder: Path, count: int = 40, tasks=TASKS, **entry) -> Path:
    """A CSV, then a JSONL of made-up texts, and the stream's file."""
    entries = []
    for at, topics in enumerate(tasks):
        made = texts_of(topics, count, seed=at)
        rows = [
            {"id": row, "body": text, "team": topics[label]}
            for row, (text, label) in enumerate(zip(made.texts, made.labels.tolist(), strict=True))
        ]
        name = f"task-{at}"
        if at % 2:
            file = folder / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            file = folder / f"{name}.csv"
            with file.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        entries.append({"name": name, "train": file.name, "text": "body", "label": "team"} | entry)
    return write(folder / "mine.yaml", {"tasks": entries})


def table_stream(folder: Path) -> Path:
    """Two CSV files of numbers whose sign tells the class."""
    entries = []
    for at in range(2):
        draw = np.random.default_rng(at)
        label = draw.integers(0, 2, 80)
        values = draw.normal(size=(80, 4)) + 3 * (2 * label[:, None] - 1)
        lines = [",".join(map(str, [*row.tolist(), f"class {one}"])) for row, one in zip(values, label, strict=True)]
        (folder / f"numbers-{at}.csv").write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
        entries.append({"name": f"numbers-{at}", "train": f"numbers-{at}.csv", "label": "label"})
    return write(folder / "tables.yaml", {"name": "my-tables", "tasks": entries})


def image_stream(folder: Path) -> Path:
    """Two folders of small images, dark and light ones."""
    entries = []
    for at in range(2):
        draw = np.random.default_rng(at)
        for name, level in (("dark", 40), ("light", 200)):
            (folder / f"images-{at}" / name).mkdir(parents=True)
            for row in range(12):
                pixels = (draw.integers(-30, 30, (8, 8, 3)) + level).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"images-{at}" / name / f"{row}.png")
        entries.append({"name": f"images-{at}", "train": f"images-{at}", "test": 0.25})
    return write(folder / "images.yaml", {"shape": [3, 8, 8], "tasks": entries})


def write(file: Path, content: object) -> Path:
    file.write_text(yaml.safe_dump(content))
    return file


assert set(TOPICS) >= {topic for task in TASKS for topic in task}
