"""Print joint training with shared outputs and without the mask at the test, from the records of this folder.

python studies/published-settings/table.py
"""

import argparse
import json
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent


def main() -> None:
    """Print a row per record."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print("| record | batch | rate | average accuracy % | last task % |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for file in sorted(HERE.glob("*.json")):
        record = json.loads(file.read_text("utf-8"))
        config, found = record["config"], record["accuracies"]
        rate = config.get("settings", config)["lr"]
        rows = found if isinstance(found, dict) else {"": found}
        for name, values in rows.items():
            title = file.stem + (f", {name}" if name else "")
            cells = [title, str(config.get("batch_size", 64)), str(rate), f"{mean(values):.2f}", f"{values[-1]:.2f}"]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
