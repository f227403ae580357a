"""Print the tables of this study from `rates.jsonl` and `grids.jsonl`: accuracy % on held-out training images.

python studies/tuning/table.py
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
KEYS = ("strength", "buffer", "lr", "weight_decay")  # of rows; methods and heads are columns


def lines(name: str) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(line) for line in (HERE / name).read_text("utf-8").splitlines()]


def rates() -> None:
    """Rates and decay of the mask methods: means over the tasks after each phase."""
    print("| grid | mask rate | weight rate | decay | after the mask | after the weights |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for record in lines("rates.jsonl"):
        grid, _, values = record["name"].partition("/")
        ends = {
            phase: mean(end["validation"] for end in record["last_epochs"] if end["phase"] == phase)
            for phase in ("mask", "weights")
        }
        cells = [grid, *values.split("-"), *(f"{value:.2f}" for value in ends.values())]
        print(f"| {' | '.join(cells)} |")


def grid(record: dict[str, Any]) -> None:
    """One grid of the other methods: a row per setting, a column per method and head."""
    rows = record["rows"]
    keys = [key for key in KEYS if key in rows[0]]
    columns = list(dict.fromkeys(_column(row) for row in rows))
    print(f"\n{record['name']}\n")
    print(f"| {' | '.join([*keys, *columns])} |")
    print(f"|{' ---: |' * (len(keys) + len(columns))}")
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[_column(row)] = row["at the end"]
    for setting, values in found.items():
        cells = [f"{values[column]:.2f}" if column in values else "–" for column in columns]
        print(f"| {' | '.join([*setting, *cells])} |")


def _column(row: dict[str, Any]) -> str:
    return row["method"] + (f" {row['head']}" if "head" in row else "")


def main() -> None:
    """Print all tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rates()
    for record in lines("grids.jsonl"):
        grid(record)


if __name__ == "__main__":
    main()
