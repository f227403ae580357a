"""Start-up time: `exssnet --help`, and `import exssnet.model` after `import torch`, in new processes.

python benchmarks/startup.py --json studies/performance/startup.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from exssnet.cli.console import one_line_errors
from exssnet.experiments.environment import device_name, versions

COMMANDS = {
    "exssnet --help": ["-m", "exssnet", "--help"],
    "import torch": ["-c", "import torch"],
    "import torch, exssnet.model": ["-c", "import torch, exssnet.model"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_ in range(options.rounds + 1):
        for name, arguments in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if round_:  # the first round fills the disk cache
                times[name].append(time.perf_counter() - started)
    for name, values in times.items():
        print(f"{name:28} {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    over = statistics.median(times["import torch, exssnet.model"]) - statistics.median(times["import torch"])
    print(f"import after torch           {over:.2f} s (bounds: 0.5, and 0.3 for --help)")
    if options.json:
        record = {"seconds": times, "versions": versions(), "device": device_name("cpu")}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
