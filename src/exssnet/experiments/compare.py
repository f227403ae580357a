"""Compare run records: a row per benchmark, method and settings, with spreads and differences. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from exssnet.errors import InputError, RunError, printable
from exssnet.experiments import archive
from exssnet.experiments.config import RunConfig
from exssnet.experiments.recipes import recipe
from exssnet.experiments.record import Record
from exssnet.experiments.record import read as read_record

RECORD = "results.json"
BOUNDS = ("multitask", "individual")  # they do not learn tasks in sequence: shown first, never marked as best
NOT_COMPARED = {"benchmark", "method", "seed", "class_order_seed", "device", "threads", "compile", "settings"}
SAME_TASKS = (
    "tasks",
    "class_order",
    "samples_per_class",
    "sample",
)  # methods are compared only if these are equal
EPOCHS = "epochs per task"
ACROSS_METHODS = (
    "setting",
    "validation",
    "network",
    "width",
    "encoder",
    "precision",
    "batch_size",
    EPOCHS,
)  # other settings belong to the recipe of a method

PUBLISHED_ENCODER = "bert-base-uncased"

Seed = tuple[int, int]  # of the run, and of its class order if a seed decides it
Spread = tuple[float, float | None]  # mean, and standard deviation of two or more values


@dataclass(frozen=True)
class Run:
    """The values of one record that a table needs."""

    source: str  # its file, and the line in a file of several records
    benchmark: str
    miniature: bool
    method: str
    seed: Seed
    settings: dict[str, Any]  # runs are averaged only if these are equal
    accuracy: float
    forgetting: float | None
    overlap: float | None  # of masks, in %
    proved: bool | None  # None: the method guarantees nothing
    megabytes: float | None
    seconds: float
    device: str
    sample: bool = False  # of a data set that was there only in part


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, and half its 95 % confidence interval."""

    mean: float
    half: float
    pairs: int


@dataclass(frozen=True)
class Row:
    """A method on a benchmark: runs that differ only in the seed."""

    benchmark: str
    miniature: bool
    method: str
    differs: tuple[str, ...]  # `name=value` of settings that differ in other rows of the benchmark
    head: str
    seeds: int
    accuracy: Spread
    forgetting: Spread | None
    overlap: Spread | None
    proved: bool | None
    published: tuple[float, float | None] | None  # accuracy and forgetting
    against: str | None
    difference: Difference | None
    megabytes: Spread | None
    seconds: Spread | None  # None: on different devices
    best: bool = False
    sample: bool = False

    @property
    def title(self) -> str:
        return self.benchmark + (" (miniature)" if self.miniature else "") + (" (sample)" if self.sample else "")


# --- records -------------------------------------------------------------------------------------------------


def read(paths: Iterable[Path]) -> list[Run]:
    """Read every run below the folders or in the files; a file in two folders counts once."""
    files: dict[Path, Path] = {}
    for path in paths:
        found = [path] if path.name in (RECORD, archive.NAME) and not path.is_dir() else _below(path)
        files |= {file.resolve(): file for file in found}
    return [run for file in files.values() for run in _runs(file)]


def _below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name folders with runs, such as the --out of `exssnet run`")
    found = sorted(file for name in (RECORD, archive.NAME) for file in folder.rglob(name))
    if not found:
        raise InputError(f"{folder} has no finished run: no {RECORD} or {archive.NAME} is in it or below")
    return found


def _runs(file: Path) -> list[Run]:
    if file.name == archive.NAME:
        return [_run(source, found) for source, found in archive.read(file)]
    return [_run(str(file), read_record(file)[0])]


def _matters(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether runs that differ in this setting are different rows; KKT settings matter only with KKT."""
    idle = name.startswith("kkt_") and not settings.get("kkt", True)
    return name not in NOT_COMPARED and not idle


def _run(source: str, found: Record) -> Run:
    config, settings = found.config, found.config.settings
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)}
    compared = {name: _shown_safely(value) for name, value in (shared | settings).items() if _matters(name, settings)}
    return Run(
        source,
        printable(found.benchmark),
        found.miniature,
        printable(found.method),
        (found.seed, config.class_order_seed if config.class_order == "seed" else 0),
        compared | {EPOCHS: _epochs(found, source)},
        found.average_accuracy,
        found.forgetting,
        None if found.average_sparse_overlap is None else 100 * found.average_sparse_overlap,
        None if found.zero_forgetting is None else found.zero_forgetting.verified,
        None if found.storage is None else _megabytes(found.storage),
        found.seconds.total,
        printable(found.device),
        found.sample,
    )


def _shown_safely(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def _epochs(record: Record, source: str) -> int:
    """Epochs per task, all phases together; older records of the mask methods do not have the field."""
    if record.epochs is not None:
        return record.epochs
    settings = record.config.settings
    second = 0 if record.method.startswith("supsup") else settings.get("weight_epochs")
    if not isinstance(settings.get("mask_epochs"), int) or not isinstance(second, int):
        raise RunError(f"{source}: epochs is missing: delete the file and make the run again")
    return int(settings["mask_epochs"] + second)


def _megabytes(bits: Mapping[str, float]) -> float:
    return sum(count for kind, count in bits.items() if not kind.startswith("paper_")) / 8e6


@cache
def _published() -> dict[str, Any]:
    """Published numbers by benchmark and method."""
    import yaml

    found: dict[str, Any] = yaml.safe_load((resources.files(__package__) / "published.yaml").read_text("utf-8"))
    return found


# --- rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    first: Run
    runs: dict[Seed, Run]

    def accuracies(self) -> dict[Seed, float]:
        return {seed: run.accuracy for seed, run in self.runs.items()}


def compare(runs: Sequence[Run], against: str | None = None, sort: str = "accuracy") -> list[Row]:
    """Make a row per benchmark, method and settings: the bounds first, then the others by accuracy or name."""
    reference = _named(against, runs)
    blocks: dict[tuple[str, ...], list[_Group]] = {}
    for group in _groups(runs):
        first = group.first
        cut = [json.dumps(first.settings[name]) for name in SAME_TASKS]
        blocks.setdefault((first.benchmark, str(first.miniature), str(first.sample), *cut), []).append(group)

    rows: list[Row] = []
    for key in sorted(blocks):
        others = [some[0].first for other, some in blocks.items() if other[:3] == key[:3]]
        cut = [name for name in _varying([run.settings for run in others]) if name in SAME_TASKS]
        block = [_row(group, blocks[key], reference, cut) for group in blocks[key]]
        block.sort(key=lambda row: (row.method, row.head, row.differs))
        if sort == "accuracy":
            block.sort(key=lambda row: -row.accuracy[0])
        learners = [row for row in block if row.method not in BOUNDS]
        top = max((_shown(row) for row in learners), default=None)
        rows += [row for row in block if row.method in BOUNDS]
        rows += [replace(row, best=_shown(row) == top) for row in learners]
    return rows


@dataclass(frozen=True)
class _Reference:
    """The method the others are compared with, and its head if it was run with several."""

    method: str
    head: str | None

    def __str__(self) -> str:
        return self.method if self.head is None else f"{self.method}@{self.head}"

    def is_of(self, run: Run) -> bool:
        return run.method == self.method and self.head in (None, run.settings["head"])


def _named(against: str | None, runs: Sequence[Run]) -> _Reference | None:
    """Parse `method` or `method@head`; ExSSNeT by default."""
    heads: dict[str, set[str]] = {}
    for run in sorted(runs, key=lambda run: run.method):
        heads.setdefault(run.method, set()).add(run.settings["head"])
    method, _, head = (against or "exssnet").partition("@")
    if against is None and len(heads.get(method, ())) != 1:
        return None
    if method not in heads:
        raise InputError(f"no run of '{method}' to compare with: choose one of {', '.join(heads)}")
    full = [f"{method}@{one}" for one in sorted(heads[method])]
    if head and head not in heads[method]:
        raise InputError(f"no run of '{against}' to compare with: choose {' or '.join(full)}")
    if not head and len(full) > 1:
        raise InputError(f"'{method}' was run with several heads: choose {' or '.join(full)}")
    return _Reference(method, head or None)


def _shown(row: Row) -> float:
    return round(row.accuracy[0], 2)  # equal as printed means equally good


def _groups(runs: Sequence[Run]) -> list[_Group]:
    groups: dict[tuple[str, ...], _Group] = {}
    for run in runs:
        key = run.benchmark, run.method, f"{run.miniature} {run.sample}", json.dumps(run.settings, sort_keys=True)
        same = groups.setdefault(key, _Group(run, {})).runs
        if run.seed in same:
            raise InputError(
                f"{same[run.seed].source} and {run.source} have the same settings and seed: remove one of them"
            )
        same[run.seed] = run
    return list(groups.values())


def _row(group: _Group, block: Sequence[_Group], against: _Reference | None, cut: Sequence[str]) -> Row:
    run, runs = group.first, group.runs.values()
    proofs = [run.proved for run in runs]
    reference = _partner(group, [other for other in block if against is not None and against.is_of(other.first)])
    return Row(
        run.benchmark + "".join(f", {name} {run.settings[name]}" for name in cut),
        run.miniature,
        run.method,
        _differs(run, [other.first for other in block]),
        run.settings["head"],
        len(runs),
        spread([run.accuracy for run in runs]),
        _spread_if_known([run.forgetting for run in runs]),
        _spread_if_known([run.overlap for run in runs]),
        None if None in proofs else all(proofs),
        _as_published(run),
        None if against is None else str(against),
        None if reference is None else difference(group.accuracies(), reference.accuracies()),
        _spread_if_known([run.megabytes for run in runs]),
        spread([run.seconds for run in runs]) if len({run.device for run in runs}) == 1 else None,
        sample=run.sample,
    )


def _as_published(run: Run) -> tuple[float, float | None] | None:
    """Published accuracy and forgetting, if the run has the published settings."""
    paper, own = _published(), run.settings
    numbers = paper["benchmarks"].get(run.benchmark, {}).get(run.method)
    if numbers is None or run.miniature or run.sample:
        return None
    wanted = paper["settings"] | {
        "tasks": paper["tasks"],
        EPOCHS: paper["epochs"].get(run.benchmark),
        "head": "masked-test" if run.method in paper["masked_test"] else own["head"],
        "network": recipe(run.benchmark)["network"],
        "width": None,
        "sample": None,
        "encoder": PUBLISHED_ENCODER if own.get("encoder") else None,
        "setting": "task-incremental",
    }
    if any(own[name] != value for name, value in wanted.items() if name in own):
        return None
    return numbers[0], numbers[1]


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation of a sample."""
    return mean(values), stdev(values) if len(values) > 1 else None


def _spread_if_known(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return spread(known) if len(known) == len(values) else None


def difference(mine: Mapping[Seed, float], theirs: Mapping[Seed, float]) -> Difference | None:
    """Mean difference over common seeds, with Student's t; None for fewer than two."""
    gaps = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if len(gaps) < 2:
        return None
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(gaps) - 1, 0.975))
    return Difference(mean(gaps), quantile * stdev(gaps) / math.sqrt(len(gaps)), len(gaps))


def _partner(group: _Group, candidates: Sequence[_Group]) -> _Group | None:
    """The one candidate with the settings that all methods should share; None if there is not exactly one other."""
    mine = group.first.settings
    fit = [other for other in candidates if all(other.first.settings[name] == mine[name] for name in ACROSS_METHODS)]
    return fit[0] if len(fit) == 1 and fit[0] is not group else None


def _differs(run: Run, block: Sequence[Run]) -> tuple[str, ...]:
    """Settings that differ between runs of the method, or that all methods should share, except the head."""
    own = _varying([other.settings for other in block if other.method == run.method])
    shared = [name for name in _varying([other.settings for other in block]) if name in ACROSS_METHODS]
    names = [name for name in dict.fromkeys(own + shared) if name != "head"]
    return tuple(f"{name}={run.settings.get(name)}" for name in names)


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for some in settings for name in some)
    return [name for name in names if any(some.get(name) != settings[0].get(name) for some in settings)]
