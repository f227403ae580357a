"""The records of this repository, and comparisons as a program and as a user make them."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from exssnet.experiments import compare

STUDIES = Path(__file__).parents[2] / "studies"


def record_of(study: str, method: str, seed: int = 0) -> dict[str, Any]:
    """A record of a study, as it is written."""
    records = map(json.loads, gzip.decompress((STUDIES / study / "records.jsonl.gz").read_bytes()).splitlines())
    return next(record for record in records if (record["method"], record["seed"]) == (method, seed))


def rows(folder, **options):
    return compare.compare(compare.read([folder]), **options)


def exssnet(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "exssnet", "compare", *map(str, arguments)], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip
