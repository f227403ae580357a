"""The check of a whole directory: every byte of every file, and every task against what it was when it was learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from exssnet.errors import ExssnetError, ForgettingError, StoreError
from exssnet.store.folder import MANIFEST, Folder, Missing
from exssnet.store.manifest import File, Manifest, parse

if TYPE_CHECKING:
    from exssnet.core.proof import Verification

ROLLBACK = "(only the way back)"


@dataclass(frozen=True)
class Problem:
    """A file that is not what it should be, and the tasks that need it."""

    file: str
    tasks: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        hit = ", ".join(self.tasks) or "no task"
        return f"{self.what}; it hits {hit}"


@dataclass(frozen=True)
class Report:
    """What a check found."""

    problems: tuple[Problem, ...]
    files: int
    bytes: int
    tasks: Verification | None  # None where a damaged file kept the tasks from being read

    @property
    def verified(self) -> bool:
        return not self.problems

    def require(self) -> Report:
        """Raise if anything is wrong, naming the first file and the tasks it hits."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise StoreError(f"{self.problems[0]}{more}")
        return self


def verify(folder: Folder, module: nn.Module | None = None) -> Report:
    """Read everything again. Without the module a network of the user's own needs, only the files are checked."""
    try:
        content = folder.manifest_bytes()
        manifest = parse(content, str(folder.path / MANIFEST))
    except StoreError as error:
        if not folder.exists():
            raise
        return Report((Problem(MANIFEST, ("all tasks",), str(error)),), 1, 0, None)
    wanted = _wanted(manifest)
    problems, size = [], len(content)
    for file, tasks in wanted.items():
        try:
            size += len(folder.read(file))
        except StoreError as error:
            if not (isinstance(error, Missing) and file == manifest.before):  # swept after it had been undone
                problems.append(Problem(file.name, tasks, str(error)))
    if manifest.before is not None:
        problems += _way_back(folder, manifest.before, set(wanted))
    report = Report(tuple(problems), len(wanted) + 1, size, None)
    if problems or (manifest.base["network"] is None and module is None):
        return report
    return _with_tasks(folder, module, report)


def _wanted(manifest: Manifest) -> dict[File, tuple[str, ...]]:
    """Every file, with the tasks that cannot do without it."""
    names = tuple(task.name for task in manifest.tasks)
    wanted: dict[File, tuple[str, ...]] = {}
    if manifest.base_file is not None:
        wanted[manifest.base_file] = names
    for place, task in enumerate(manifest.tasks):
        wanted[task.card] = (task.name,)
        wanted[task.tensors] = names[place:]  # masks and weights of later tasks are read through those before
    if manifest.before is not None:
        wanted[manifest.before] = (ROLLBACK,)
    return wanted


def _way_back(folder: Folder, before: File, seen: set[File]) -> list[Problem]:
    problems = []
    try:
        files = list(parse(folder.read(before), before.name).files())
    except StoreError:
        return []  # told already, or undone
    for file in files:
        if file not in seen:
            try:
                folder.read(file)
            except StoreError as error:
                problems.append(Problem(file.name, (ROLLBACK,), str(error)))
    return problems


def _with_tasks(folder: Folder, module: nn.Module | None, report: Report) -> Report:
    from exssnet.store.model import StoredModel

    try:
        network = StoredModel(folder, module, None).model.network
        found = network.verify()
        problems = tuple(
            Problem(tensor, (task,), f"tensor '{tensor}' no longer has its digest") for task, tensor in found.changed
        )
        return Report(problems, report.files, report.bytes, found)
    except (ExssnetError, ForgettingError) as error:
        return Report((Problem(MANIFEST, ("all tasks",), str(error)),), report.files, report.bytes, None)
