"""Pack the records of run folders into one file that `exssnet compare` reads.

    python studies/pack.py runs/split-mnist --out studies/split-mnist/records.jsonl.gz

Each line is a run's `results.json`, and in `last_epochs` the last epoch of every phase from its `log.jsonl`. The other
epochs of the log are left out. Packing the same runs again gives the same bytes.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from exssnet.cli.console import one_line_errors
from exssnet.errors import InputError
from exssnet.experiments import record

OF_AN_EPOCH = ("task", "phase", "epochs", "loss", "accuracy", "validation")


def main() -> None:
    """Read all records below the folders and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with runs")
    parser.add_argument("--out", type=Path, required=True, help="file to write, named records.jsonl.gz")
    options = parser.parse_args()
    files = sorted(file for folder in options.folders for file in folder.rglob("results.json"))
    if not files:
        raise InputError(f"no finished run is below {', '.join(map(str, options.folders))}")
    lines = [json.dumps(record.read(file)[1] | {"last_epochs": last_epochs(file.parent)}) for file in files]
    options.out.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    print(f"{len(lines)} records in {options.out}, {options.out.stat().st_size:,} bytes")


def last_epochs(run: Path) -> list[dict[str, Any]]:
    """The last epoch of every phase of a run."""
    events = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    last = [event for event in events if event["event"] == "epoch" and event["epoch"] == event["epochs"]]
    return [{name: event[name] for name in OF_AN_EPOCH} for event in last]


if __name__ == "__main__":
    with one_line_errors():
        main()
