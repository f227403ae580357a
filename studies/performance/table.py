"""Print the table of docs/performance.md from the records of this folder.

python studies/performance/table.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
Row = tuple[str, str, str, str, str]  # figure, where, bound, measured, record


def one(name: str) -> Any:
    """A record in a file of its own, or one of `variants.jsonl`."""
    file = HERE / f"{name}.json"
    if file.exists():
        return json.loads(file.read_text("utf-8"))
    return next(record for record in many("variants") if record["name"] == name)


def many(name: str) -> list[Any]:
    """The records of a file, one per process."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text("utf-8").splitlines()]


def row_of(record: Any, variant: str) -> Any:
    """The row of a step benchmark."""
    return next(row for row in record["rows"] if row["variant"] == variant)


def runs() -> list[Row]:
    """Whole runs of SplitCIFAR100."""
    found: list[Row] = []
    for figure, bound, name, key in (
        ("SplitCIFAR100, ExSSNeT + KKT, full caches", "≤ 85 s", "split-cifar100-alone", "wall_s"),
        ("SplitCIFAR100, ExSSNeT, empty caches", "≤ 120 s", "split-cifar100-empty-caches", "wall_s"),
        ("SplitCIFAR100, 8 runs together, per run", "≤ 36 s", "split-cifar100-eight", "wall_s_a_run"),
    ):
        found.append((figure, "H200", bound, f"{one(name)[key]:.1f} s", f"{name}.json"))
    return found


def steps() -> list[Row]:
    """Steps: masked over dense, and the ways to compute a dense one."""
    found: list[Row] = []
    for figure, where, bound, name in (
        ("ResNet-18 width 20", "H200", "≤ 1.05", "step-resnet18-h200"),
        ("ResNet-18 width 20", "CPU", "≤ 1.15", "step-resnet18-cpu"),
        ("LeNet-300-100", "H200", "–", "step-lenet-h200"),
        ("LeNet-300-100", "CPU", "≤ 1.15", "step-lenet-cpu"),
    ):
        records = [one(name)] if where == "H200" else many(name)
        file = f"{name}.json" if where == "H200" else f"{name}.jsonl"
        for variant, phase in (("mask", "mask training"), ("weights", "weight training")):
            ratio = median(row_of(record, variant)["over_dense"] for record in records)
            found.append((f"Masked step / dense step, {figure}, {phase}", where, bound, f"{ratio:.3f}", file))
    for figure, name, variant in (
        ("single operations, fp32", "step-resnet18-h200-plain", "dense"),
        ("CUDA graph, fp32", "step-resnet18-h200-plain", "dense graph"),
        ("compiled, Triton convolutions, fp32", "step-resnet18-h200-fp32", "dense"),
        ("compiled, cuDNN, bf16", "step-resnet18-h200-cudnn", "dense compiled graph"),
        ("compiled, Triton convolutions, bf16", "step-resnet18-h200", "dense"),
    ):
        milliseconds = row_of(one(name), variant)["ms"]
        file = f"{name}.json" if (HERE / f"{name}.json").exists() else "variants.jsonl"
        found.append((f"Dense step, ResNet-18 width 20, {figure}", "H200", "–", f"{milliseconds:.2f} ms", file))
    by_runs = {row["runs"]: row["ms_a_step_and_run"] for row in one("together-resnet18-h200")["rows"]}
    for count in (1, 8):
        figure = f"Masked step, ResNet-18 width 20, {count} run{'s' if count > 1 else ''} together, per run"
        found.append((figure, "H200", "–", f"{by_runs[count]:.2f} ms", "together-resnet18-h200.json"))
    return found


def small() -> list[Row]:
    """A small loop, its parts, and start-up."""
    fisher = min(median(record["ratios"]) for record in many("fisher"))
    seconds = {name: median(values) for name, values in one("startup")["seconds"].items()}
    imported = seconds["import torch, exssnet.model"] - seconds["import torch"]
    return [
        (
            "SplitMNIST 1 + 1 epochs / plain PyTorch loop",
            "CPU",
            "≤ 1.2",
            f"{median(one('loop')['ratios']):.2f}",
            "loop.json",
        ),
        ("Fisher information of 10,000 images, one at a time / batched", "CPU", "≥ 5", f"{fisher:.1f}", "fisher.jsonl"),
        ("KKT / training, SplitMNIST 15 + 15 epochs, largest task", "CPU", "< 3 %", share("transfer"), "transfer.json"),
        (
            "KKT / training, SplitMNIST 15 + 15 epochs, largest task",
            "H200",
            "–",
            share("transfer-h200"),
            "transfer-h200.json",
        ),
        (
            "KKT / training, SplitCIFAR100, largest task",
            "H200",
            "< 3 %",
            f"{max(one('split-cifar100-alone')['kkt_percent']):.2f} %",
            "split-cifar100-alone.json",
        ),
        ("`exssnet --help`", "CPU", "< 0.3 s", f"{seconds['exssnet --help']:.2f} s", "startup.json"),
        ("`import exssnet.model` after `import torch`", "CPU", "≤ 0.5 s", f"{imported:.2f} s", "startup.json"),
    ]


def share(name: str) -> str:
    """The largest of the tasks' median shares."""
    return f"{100 * max(map(median, one(name)['shares'])):.2f} %"


def stores() -> list[Row]:
    """Many tasks, and model directories."""
    thousand, store, masks = one("thousand"), one("store"), one("codec")["masks"]
    early, late = thousand["seconds"][9:109], thousand["seconds"][-100:]
    memory = (thousand["resident_bytes"][-1] - thousand["resident_bytes"][9]) / (len(thousand["seconds"]) - 10)
    alone = max(mask["of entropy"] for mask in masks if mask["contexts"] == "none")
    decoding = max(mask["decode seconds"] for mask in masks if mask["network"] == "ResNet-50")
    return [
        (
            "1,000 tasks: time of the last 100 / of tasks 10 to 109",
            "CPU",
            "flat",
            f"{median(late) / median(early):.2f}",
            "thousand.json",
        ),
        ("1,000 tasks: memory per task, 125,600 weights", "CPU", "flat", f"{memory / 1000:.1f} kB", "thousand.json"),
        (
            "100 tasks in a directory: time of the last 20 / of tasks 6 to 25",
            "CPU",
            "flat",
            f"{one('hundred')['ratio']:.2f}",
            "hundred.json",
        ),
        (
            "100 tasks in a directory of 49,200 weights: size on disk",
            "CPU",
            "–",
            f"{one('hundred')['rows'][-1]['on_disk'] / 1000:,.0f} kB",
            "hundred.json",
        ),
        ("Stored mask / its entropy, densities 0.05 to 0.3", "CPU", "≤ 1.03", f"{alone:.4f}", "codec.json"),
        ("Decoding a mask of ResNet-50, 25.5 million weights", "CPU", "< 1 s", f"{decoding:.2f} s", "codec.json"),
        (
            "64 rows over 16 tasks: one call per task / one call",
            "CPU",
            "≥ 3",
            f"{store['mixed_ratio']:.2f}",
            "store.json",
        ),
        (
            "Switching between cached tasks, ResNet-18 width 20",
            "CPU",
            "< 1 ms",
            f"{store['switch_ms']:.2f} ms",
            "store.json",
        ),
        ("Opening and listing a directory of 1,000 tasks", "CPU", "< 1 s", f"{store['open_s']:.2f} s", "store.json"),
    ]


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("| figure | on | bound | measured | record |")
    print("| --- | --- | ---: | ---: | --- |")
    for figure, where, bound, measured, record in [*runs(), *steps(), *small(), *stores()]:
        print(f"| {figure} | {where} | {bound} | {measured} | `{record}` |")


if __name__ == "__main__":
    main()
