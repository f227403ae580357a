"""Prints a Markdown table of the run records below a folder: mean ± std over seeds, per benchmark and method.

python results/table.py results/split-mnist
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

# Average accuracy in the paper's Tables 2 and 3 (Yadav and Bansal, Findings of ACL 2023): the best epoch on test data.
PUBLISHED = {
    ("split-mnist", "supsup"): 99.6,
    ("split-mnist", "supsup+kkt"): 99.6,
    ("split-mnist", "ssnet"): 99.7,
    ("split-mnist", "ssnet+kkt"): 99.3,
    ("split-mnist", "exssnet"): 99.7,
    ("split-mnist", "exssnet+kkt"): 99.7,
    ("split-cifar100", "supsup"): 62.1,
    ("split-cifar100", "supsup+kkt"): 67.1,
    ("split-cifar100", "ssnet"): 23.9,
    ("split-cifar100", "ssnet+kkt"): 23.5,
    ("split-cifar100", "exssnet"): 67.3,
    ("split-cifar100", "exssnet+kkt"): 70.5,
}

COLUMNS = [
    "benchmark",
    "method",
    "seeds",
    "average accuracy %",
    "published",
    "forgetting",
    "overlap %",
    "proved",
    "seconds",
]


def spread(values: list[float | None], digits: int) -> str:
    """Mean ± standard deviation; a dash where a value is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "–"
    if len(known) == 1:
        return f"{known[0]:.{digits}f}"
    return f"{mean(known):.{digits}f} ± {stdev(known):.{digits}f}"


def row(records: list[dict[str, Any]]) -> list[str]:
    """The cells of a method on a benchmark."""
    benchmark, method, miniature = (records[0][name] for name in ("benchmark", "method", "miniature"))
    proved = all(record["zero_forgetting"]["verified"] for record in records)
    return [
        benchmark + (" (miniature)" if miniature else ""),
        method,
        str(len(records)),
        spread([record["average_accuracy"] for record in records], 2),
        str("–" if miniature else PUBLISHED.get((benchmark, method), "–")),
        spread([record["forgetting"] for record in records], 2),
        spread([100 * record["average_sparse_overlap"] for record in records], 1),
        "yes" if proved else "no",
        spread([record["seconds"]["total"] for record in records], 0),
    ]


def main() -> None:
    """Print a table for each folder that `--out` named."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    tables: dict[Path, dict[tuple[str, str], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(root.rglob("results.json")):
        out, benchmark, method = file.parents[3], file.parents[2].name, file.parents[1].name
        tables[out][benchmark, method].append(json.loads(file.read_text()))
    for out, groups in tables.items():
        if len(tables) > 1:
            print(f"{os.path.relpath(out)}:\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        for records in groups.values():
            print(f"| {' | '.join(row(records))} |")
        if len(tables) > 1:
            print()


if __name__ == "__main__":
    main()
