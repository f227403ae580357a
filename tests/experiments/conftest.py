"""Records of runs that nobody has to make."""

import json

import pytest
from tests.experiments.comparing import record_of


@pytest.fixture
def put(tmp_path):
    """Writes records that differ from a real one in what is named; returns their folder."""
    real = record_of("split-mnist", "exssnet")

    def write(method, accuracies, benchmark="split-mnist", place="a", config=None, settings=None, **changes):
        own = {"kkt": method.endswith("+kkt")} | (settings or {})
        for seed, accuracy in enumerate(accuracies):
            record = (
                real | {"benchmark": benchmark, "method": method, "seed": seed, "average_accuracy": accuracy} | changes
            )
            fields = {"benchmark": benchmark, "method": method, "seed": seed, "class_order_seed": seed} | (config or {})
            record["config"] = real["config"] | fields | {"settings": real["config"]["settings"] | own}
            file = tmp_path / place / benchmark / method / f"seed-{seed}" / "results.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(record), "utf-8")
        return tmp_path

    return write
