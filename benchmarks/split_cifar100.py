"""Time of SplitCIFAR100 with ExSSNeT, 5 × (50 + 50) epochs, batch 64, from the command to the last record.

    python benchmarks/split_cifar100.py --runs 1
    python benchmarks/split_cifar100.py --runs 8

Starts `exssnet run` in another process, with `--runs` runs together. The caches of compiler and data are used as they
are; --empty-caches starts without any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from exssnet.cli.console import one_line_errors
from exssnet.experiments.environment import device_name, versions
from transfer import trained

CACHES = {"EXSSNET_CACHE": "data", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="number of runs: seeds times methods")
    parser.add_argument("--together", default="auto")
    parser.add_argument("--method", default="exssnet")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--epochs", type=int, default=50, help="epochs per phase; the bounds are for 50")
    parser.add_argument("--empty-caches", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    methods = options.method.count(",") + 1
    if options.runs < 1 or options.runs % methods:
        parser.error(f"--runs is {options.runs}: give a multiple of the {methods} methods")
    if options.keep and any(options.keep.rglob("results.json")):
        parser.error(f"{options.keep} has runs, which would be read instead of repeated: give another folder")

    with tempfile.TemporaryDirectory() as folder:
        out, environment = options.keep or Path(folder, "runs"), dict(os.environ)
        if options.empty_caches:
            environment |= {name: str(Path(folder, place)) for name, place in CACHES.items()}
        seeds = ",".join(str(seed) for seed in range(options.runs // methods))
        epochs = ["--mask-epochs", str(options.epochs), "--weight-epochs", str(options.epochs)]
        command = [sys.executable, "-m", "exssnet", "run", "split-cifar100", "--method", options.method, "--seeds",
                   seeds, "--together", options.together, "--precision", options.precision, *epochs]  # fmt: skip
        started = time.time()
        asked = [*command, "--out", str(out), "--json"]
        found = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True)
        if found.returncode:
            sys.exit(found.returncode)  # it has printed the reason
        ended = time.time() - started
        wall = max(file.stat().st_mtime for file in out.rglob("results.json")) - started
    records = json.loads(found.stdout)
    records = records if isinstance(records, list) else [records]

    inside = [record["seconds"]["total"] for record in records]
    tasks = [task for record in records for task in record["seconds"]["tasks"]]
    spent = {name: sum(task.get(name, 0.0) for task in tasks) / len(records) for name in tasks[0]}
    share = 100 * sum(task["evaluation"] for task in tasks) / sum(inside)
    accuracies = [record["average_accuracy"] for record in records]
    borrowing = [task for record in records if record["config"]["settings"].get("kkt")
                 for task in record["seconds"]["tasks"][1:]]  # fmt: skip
    transfer = [100 * task["setup"] / trained(task) for task in borrowing]
    print(f"{options.runs} runs of 5 × ({options.epochs} + {options.epochs}) epochs, {records[0]['device']}")
    print(f"from command to record {wall:.1f} s, {wall / options.runs:.1f} s per run; process {ended:.1f} s")
    print(f"start-up {wall - max(inside):.1f} s, then the longest run {max(inside):.1f} s")
    print(f"in a run {sum(inside) / len(inside):.1f} s: " + ", ".join(f"{n} {s:.1f} s" for n, s in spent.items()))
    print(f"evaluation {share:.2f} % of a run, average accuracy {sum(accuracies) / len(accuracies):.2f} %")
    if transfer:
        print(f"KKT and drawing scores: {min(transfer):.2f} to {max(transfer):.2f} % of a task's training")
    if options.json:
        record = {
            "command": " ".join(["exssnet", *command[3:]]), "empty_caches": options.empty_caches,
            "writes_bytecode": not sys.dont_write_bytecode, "wall_s": wall,
            "process_s": ended, "wall_s_a_run": wall / options.runs, "in_run_s": inside,
            "spent_s": spent, "evaluation_percent": share, "kkt_percent": transfer,
            "accuracies": accuracies, "digests": [record["zero_forgetting"]["digests"] for record in records],
            "versions": versions(),
            "device": device_name("cuda"), "config": records[0]["config"],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
