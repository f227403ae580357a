"""Metrics of a run, all from its accuracy matrix: a[i][j] is the accuracy on task j after learning task i."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

Matrix = Sequence[Sequence[float | None]]  # None: not learned yet, or not measured


def average_accuracy(matrix: Matrix) -> float:
    """Mean of the last row."""
    return mean(_number(a) for a in matrix[-1])


def forgetting(matrix: Matrix) -> float:
    """Mean over t < N of max_{k ≤ N−1} a[k][t] − a[N][t]; may be negative. The paper's definition."""
    return _mean_drop(matrix, lambda column: max(column[:-1]))


def forgetting_first(matrix: Matrix) -> float:
    """Accuracy when just learned minus accuracy at the end (Avalanche's definition)."""
    return _mean_drop(matrix, lambda column: column[0])


def forgetting_maximum(matrix: Matrix) -> float:
    """As `forgetting`, but the maximum includes the last row, so it is never negative (Mammoth's definition)."""
    return _mean_drop(matrix, max)


FORGETTING: dict[str, Callable[[Matrix], float]] = {
    "paper": forgetting,
    "avalanche": forgetting_first,
    "mammoth": forgetting_maximum,
}


def average_overlap(overlaps: Sequence[float | None]) -> float | None:
    """Mean sparse overlap over tasks 2..N; None for a single task."""
    known = [overlap for overlap in overlaps if overlap is not None]
    return mean(known) if known else None


def _mean_drop(matrix: Matrix, reference: Callable[[list[float]], float]) -> float:
    if len(matrix) < 2:
        return 0.0
    columns = [[row[t] for row in matrix[t:]] for t in range(len(matrix) - 1)]
    measured = [
        [_number(column[0]), *(a for a in column[1:-1] if a is not None), _number(column[-1])] for column in columns
    ]
    return mean(reference(column) - column[-1] for column in measured)


def _number(entry: float | None) -> float:
    if entry is None:
        raise ValueError("the accuracy matrix has a gap on its diagonal or in its last row")
    return entry
