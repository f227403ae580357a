"""Prints a Markdown table of the run records below a folder: mean ± std over seeds, per benchmark and method.

python results/table.py results/split-mnist
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

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


def spread(values: list[float], digits: int) -> str:
    """Mean ± standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    groups = defaultdict(list)
    for file in sorted(root.rglob("results.json")):
        record = json.loads(file.read_text())
        groups[record["benchmark"], record["method"], record["miniature"]].append(record)
    print("| benchmark | method | seeds | average accuracy % | published | forgetting | overlap % | proved | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (benchmark, method, miniature), records in groups.items():
        proofs = {record["zero_forgetting"]["verified"] for record in records}
        overlaps = [100 * record["average_sparse_overlap"] for record in records]
        cells = [
            benchmark + (" (miniature)" if miniature else ""),
            method,
            str(len(records)),
            spread([record["average_accuracy"] for record in records], 2),
            str("–" if miniature else PUBLISHED.get((benchmark, method), "–")),
            spread([record["forgetting"] for record in records], 2),
            spread(overlaps, 1),
            "yes" if proofs == {True} else "no",
            spread([record["seconds"]["total"] for record in records], 0),
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
