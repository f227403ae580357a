"""The check of a directory: the digests of all files, and of every task as it was learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from exssnet.core.proof import ALL_TASKS
from exssnet.errors import ExssnetError, StoreError
from exssnet.store.directory import MANIFEST, Folder, Missing
from exssnet.store.format import probe
from exssnet.store.format.card import identity
from exssnet.store.format.manifest import File, Manifest, parse
from exssnet.store.reader import Reader

if TYPE_CHECKING:
    from exssnet.core.proof import Verification

ROLLBACK = "(only the way back)"
TRIES = 10


@dataclass(frozen=True)
class Problem:
    """A damaged file, and the tasks that need it."""

    file: str
    tasks: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        hit = ", ".join(self.tasks) or "no task"
        return f"{self.what}; it hits {hit}"


@dataclass(frozen=True)
class Report:
    """Result of a check."""

    problems: tuple[Problem, ...]
    files: int
    bytes: int
    tasks: Verification | None  # None if damage prevented reading the tasks

    @property
    def verified(self) -> bool:
        return not self.problems

    def require(self) -> Report:
        """Raise an error for the first damaged file, with the tasks that need it."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise StoreError(f"{self.problems[0]}{more}")
        return self


def verify(folder: Folder, module: nn.Module | None = None) -> Report:
    """Read and check everything. Without the module of a user's network only files are checked."""
    report = _check(folder, module)
    for _ in range(TRIES):
        if report.verified:
            break
        before, report = report, _check(folder, module)
        if report == before:  # a file that another process removed meanwhile is not missing in the second pass
            break
    return report


def _check(folder: Folder, module: nn.Module | None) -> Report:
    try:
        content = folder.manifest_bytes()
        manifest = parse(content, str(folder.path / MANIFEST))
    except StoreError as error:
        if isinstance(error, Missing) and not folder.has_tasks():
            raise
        return Report((Problem(MANIFEST, ("all tasks",), str(error)),), 1, 0, None)
    wanted = _wanted(manifest, folder.note(content))
    if manifest.before in wanted:
        wanted = _way_back(folder, manifest.before) | wanted
    problems, size = [], len(content)
    for file, tasks in wanted.items():
        try:
            size += len(folder.read(file))
        except StoreError as error:
            problems.append(Problem(file.name, tasks, str(error)))
    report = Report(tuple(problems), len(wanted) + 1, size, None)
    return report if problems else _with_tasks(folder, module, report)


def _wanted(manifest: Manifest, note: File | None) -> dict[File, tuple[str, ...]]:
    """Every file, with the tasks that need it. A note replaces a deleted previous manifest."""
    names = tuple(task.name for task in manifest.tasks)
    wanted: dict[File, tuple[str, ...]] = {}
    if manifest.base_file is not None:
        wanted[manifest.base_file] = names
    for position, task in enumerate(manifest.tasks):
        for file in (task.card, task.tensors):
            wanted.setdefault(file, names[position:])  # later tasks are read through those before
    way_back = manifest.before if note is None else note
    if way_back is not None:
        wanted[way_back] = (ROLLBACK,)
    return wanted


def _way_back(folder: Folder, before: File) -> dict[File, tuple[str, ...]]:
    """The files of the previous manifest."""
    try:
        return dict.fromkeys(parse(folder.read(before), before.name).files(), (ROLLBACK,))
    except StoreError:
        return {}  # reported when it is read itself


def _with_tasks(folder: Folder, module: nn.Module | None, report: Report) -> Report:
    try:
        stored = Reader(folder, module, None)
        if stored.base.network is None and module is None:
            return report
        network = stored.unproved().network
        found = network.verify()
        if stored.damage is not None:  # intact files with wrong content
            damage = stored.damage
            problem = Problem(damage.file, damage.tasks, f"{damage.file}: {damage.reason}")
            return Report((problem,), report.files, report.bytes, None)
        problems = tuple(
            Problem(tensor, (task,), f"tensor '{tensor}' no longer has its digest") for task, tensor in found.changed
        )
        problems += tuple(
            Problem(entry.card.name, (entry.name,), f"{entry.card.name} no longer says how the task was learned")
            for entry, card in zip(stored.manifest.tasks, stored.cards, strict=True)
            if card["digest"] != identity(card)
        )
        own, changed = module is not None, {task for task, _ in found.changed}
        problems += tuple(
            Problem(entry.card.name, (entry.name,), probe.refusal(entry.name, wrong, own))
            for entry, card in zip(stored.manifest.tasks, stored.cards, strict=True)
            if not changed & {entry.name, ALL_TASKS} and (wrong := probe.difference(network, card)) is not None
        )
        return Report(problems, report.files, report.bytes, found)
    except ExssnetError as error:
        return Report((Problem(MANIFEST, ("all tasks",), str(error)),), report.files, report.bytes, None)
