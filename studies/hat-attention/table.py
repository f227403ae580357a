"""Print what HAT keeps of each task, from the record of `attention.py`.

python studies/hat-attention/table.py
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    """Print a row per task and variant."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    record = json.loads((Path(__file__).parent / "attention-split-cifar100.json").read_text("utf-8"))
    print("| variant | task | learned % | at the end % | units used % | of these below 1 % | their mean attention |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for variant in ("as it is", "whole"):
        for number, task in enumerate(record[variant]["tasks"], start=1):
            values = [task["learned"], task["end"], task["used_percent"], task["loose_percent"]]
            cells = [variant, str(number), *(f"{value:.1f}" for value in values), f"{task['loose_attention']:.3f}"]
            print(f"| {' | '.join(cells)} |")
    for variant in ("as it is", "whole"):
        run = record[variant]
        print(f"{variant}: average accuracy {run['average_accuracy']:.2f} %, forgetting {run['forgetting']:.2f}")


if __name__ == "__main__":
    main()
