"""Output of the commands for runs, and lists of names."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from exssnet.cli.console import print_table, say

NONE = "–"
TOLD = "task-incremental"  # the usual setting


def print_names(descriptions: Mapping[str, str]) -> None:
    """Print names with their descriptions; on a terminal in two columns."""
    indent = max(map(len, descriptions)) + 2
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for name, text in descriptions.items():
        lines = textwrap.wrap(text, max(room - indent, 20)) if room else [text]
        say(f"{name:{indent}}{lines[0]}")
        for line in lines[1:]:
            say(" " * indent + line)


def print_record(record: Mapping[str, Any], folder: Path) -> None:
    """Print a run: a row per task, a summary and the folder."""
    part = ", a miniature of the benchmark" if record["miniature"] else ""
    part += ", on a sample of its data sets" if record.get("sample") else ""
    told = "" if record.get("setting", TOLD) == TOLD else f", {record['setting']}"
    say(f"{record['method']} on {record['benchmark']}, seed {record['seed']}{part}{told}")
    matrix, overlaps = record["accuracy_matrix"], record["sparse_overlap"]
    rows = []
    for i, classes in enumerate(record["class_order"]):
        lender = (record["transfer"][i]["lender"] if record["transfer"] else None) or NONE
        overlap = NONE if not overlaps or overlaps[i] is None else f"{100 * overlaps[i]:.1f}"
        learned = NONE if matrix[i][i] is None or (matrix[0][0] is None and len(matrix) > 1) else f"{matrix[i][i]:.2f}"
        rows.append((str(i + 1), _classes(classes), learned, f"{matrix[-1][i]:.2f}", overlap, lender))
    print_table(("task", "classes", ">learned %", ">at the end %", ">overlap %", "lender"), rows)
    say(
        f"average accuracy {record['average_accuracy']:.2f} %, forgetting {_two(record['forgetting'])}, "
        f"{record['seconds']['total']:.1f} s on {record['device']}"
    )
    say(_proof(record))
    for line in _texts(record):
        say(line)
    say(f"run: {folder}")


def _texts(record: Mapping[str, Any]) -> list[str]:
    """What was found in texts, how often the task was, and what to know of the encoder."""
    from exssnet.encoders.found import remark

    lines = []
    if record.get("task_identification"):
        lines.append(f"task found: {mean(record['task_identification']):.2f} % of the test examples")
    if record.get("texts"):
        counts = {key: sum(split[key] for split in record["texts"].values()) for key in ("texts", "cut", "empty")}
        lines.append(
            f"texts: {counts['texts']:,}, of which {counts['cut']:,} were cut and {counts['empty']:,} are empty"
        )
    encoder = record["config"].get("encoder")
    if encoder and (said := remark(encoder, {name.split()[0] for name in record["data_digests"]})):
        lines.append(f"encoder: {said}")
    return lines


def _two(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def _classes(classes: Sequence[int]) -> str:
    return " ".join(map(str, classes)) if len(classes) <= 5 else f"{len(classes)} classes"


def _proof(record: Mapping[str, Any]) -> str:
    proof = record["zero_forgetting"]
    if proof is None:
        return "zero forgetting: not guaranteed by this method"
    if proof["verified"]:
        return f"zero forgetting: verified, all {len(proof['digests'])} tasks have the digest they were learned with"
    changed = {entry.split(":")[0] for entry in proof["changed"]}
    return f"zero forgetting: no, {len(changed)} of {len(proof['digests'])} tasks changed after they were learned"


def print_summary(records: Sequence[Mapping[str, Any]]) -> None:
    """Print mean ± standard deviation over seeds, a row per method and head."""
    kinds = dict.fromkeys((record["method"], record["config"]["head"]) for record in records)
    several = len(kinds) > len({method for method, _ in kinds})
    left, accuracy = (("method", "head"), "accuracy %") if several else (("method",), "average accuracy %")
    rows = []
    for method, head in kinds:
        runs = [r for r in records if (r["method"], r["config"]["head"]) == (method, head)]
        overlaps = [100 * r["average_sparse_overlap"] for r in runs if r["average_sparse_overlap"] is not None]
        rows.append((
            *((method, head.removesuffix("-test")) if several else (method,)),
            str(len(runs)),
            _spread([r["average_accuracy"] for r in runs]),
            _spread([r["forgetting"] for r in runs]) if all(r["forgetting"] is not None for r in runs) else NONE,
            _spread(overlaps, 1) if overlaps else NONE,
            _spread([r["seconds"]["total"] for r in runs], 1),
        ))  # fmt: skip
    print()
    say(f"{records[0]['benchmark']}, mean ± std over seeds")
    print_table((*left, ">seeds", f">{accuracy}", ">forgetting", ">overlap %", ">seconds"), rows)


def _spread(values: Sequence[float], digits: int = 2) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"
