"""The record of a finished run: every number that tables and figures are made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from exssnet.data.tasks import Stream
from exssnet.experiments import metrics
from exssnet.experiments.config import RunConfig
from exssnet.experiments.environment import device_name, versions
from exssnet.methods import Method


@dataclass(frozen=True)
class FinishedRun:
    """What a record is made from."""

    config: RunConfig
    stream: Stream
    method: Method
    rows: list[list[float]]  # per learned task: the accuracies after it, up to its own
    carried_over: list[int]  # per learned task: how many of these were not measured again
    identified: dict[int, float]  # per task: test examples whose task was found, in %, at the last measurement
    seconds: list[dict[str, float]]  # per task: setup, phases, evaluation
    elapsed: float


def record_of(run: FinishedRun) -> dict[str, Any]:
    """The record of a run, as JSON."""
    config, stream, method = run.config, run.stream, run.method
    matrix = [
        [None] * (index + 1 - len(row)) + row + [None] * (len(stream) - index - 1) for index, row in enumerate(run.rows)
    ]
    measured = [
        [None if entry is None else place >= run.carried_over[index] for place, entry in enumerate(row)]
        for index, row in enumerate(matrix)
    ]
    proof, routed = method.verify(), config.setting == "class-incremental"
    # between two measurements a task that is proved unchanged has the accuracy it had; of others nothing is known
    in_turn = all(matrix[i][i] is not None for i in range(len(stream)))  # not where all are learned at once
    complete = in_turn and (config.evaluate == "all" or (not routed and proof is not None and proof.verified))
    facts = method.report()
    overlaps = facts.get("sparse_overlap")
    return {
        "benchmark": config.benchmark,
        "method": config.method,
        "seed": config.seed,
        "miniature": config.samples_per_class is not None,
        "sample": stream.sample,  # of a data set that is here only in part
        "setting": config.setting,
        "task_identification": [run.identified[i] for i in range(len(stream))] if run.identified else None,
        "texts": stream.text_counts() or None,
        "tasks": len(stream),
        "epochs": method.settings.epochs_per_task,  # per task, all phases together
        "class_order": stream.class_order,
        "accuracy_matrix": matrix,
        "accuracy_measured": measured,
        "average_accuracy": metrics.average_accuracy(matrix),
        "forgetting": metrics.forgetting(matrix) if complete else None,
        "forgetting_by_definition": {
            name: of(matrix) if complete or (in_turn and name == "avalanche") else None
            for name, of in metrics.FORGETTING.items()
        },
        "sparse_overlap": overlaps,
        "average_sparse_overlap": None if overlaps is None else metrics.average_overlap(overlaps),
        "zero_forgetting": None if proof is None else {
            "verified": proof.verified,
            "digests": proof.digests,
            "changed": [f"{task}: {tensor}" for task, tensor in proof.changed],
        },
        "transfer": facts.get("transfer"),
        "storage": facts.get("storage"),
        "seconds": {"total": run.elapsed, "tasks": run.seconds},
        "device": device_name(config.device),
        "versions": versions(),
        "data_digests": stream.data_digests,
        "config": asdict(config),
    }  # fmt: skip
