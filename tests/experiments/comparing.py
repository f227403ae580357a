"""The records of this repository, and comparisons as a program and as a user make them."""

import os
import subprocess
import sys
from pathlib import Path

from exssnet.experiments import compare

RESULTS = Path(__file__).parents[2] / "results"


def rows(folder, **options):
    return compare.compare(compare.read([folder]), **options)


def exssnet(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "exssnet", "compare", *map(str, arguments)], capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip
