"""A second process that changes model directories and can be cut off at any moment.

A server that has imported and warmed up everything forks a child for every request, so a kill costs milliseconds.
Moments are counted in writing operations of the child: opening to write, locking, linking, renaming, removing, syncing.
"""

import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

import exssnet
from exssnet.store.directory import Folder
from exssnet.store.stored_model import StoredModel
from exssnet.store.verify import verify

ROOT = Path(__file__).parents[2]
EVENTS = ("os.rename", "os.link", "os.remove", "os.truncate", "os.mkdir", "fcntl.flock")
State = tuple[tuple[str, str, bytes], ...]


def examples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(40) % 2
    return torch.rand(40, 8, generator=torch.Generator().manual_seed(seed)) + labels[:, None], labels


def exported(path: Path) -> Path:
    """Where a task of a directory is exported to; operations there are counted too."""
    return Path(f"{path}-out", "a")


def change(path: Path, what: str) -> None:
    """Do "learn NAME SEED", "remove NAME", "rename NAME TO", "export FORM", "rollback" or "create"."""
    match what.split():
        case ["create"]:
            exssnet.Model.create(path, "lenet-300-100", input=(8,), width=0.05)
        case ["learn", name, seed]:
            exssnet.Model.open(path).learn(name, examples(int(seed)), epochs=(1, 1))
        case ["remove", name]:
            exssnet.Model.open(path).remove(name)
        case ["rename", name, to]:
            exssnet.Model.open(path).rename(name, to)
        case ["export", form]:
            exssnet.Model.open(path).export("a", exported(path), form)
        case ["rollback"]:
            exssnet.Model.open(path).rollback()
        case _:
            raise ValueError(what)


def state(path: Path) -> State:
    """What a directory holds: every task with its digest and its answers, read by a new reader."""
    return answers(exssnet.Model.open(path))


def answers(stored: StoredModel) -> State:
    model, inputs = stored.model, examples(0)[0]
    return tuple((t.name, t.digest, model.logits(inputs, t.name).numpy().tobytes()) for t in stored.tasks)


def whole(path: Path) -> State:
    """The state of a directory in which nothing is wrong."""
    report = verify(Folder(path))
    assert report.verified, report.problems
    return state(path)


class Server:
    """Forks the children; `how` is what happens `at` a moment (see `Counter`), `after` kills by time in seconds."""

    def __enter__(self) -> "Server":
        places = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, places))}
        command = [sys.executable, "-m", "tests.store.second_process"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def ask(self, path: Path, *changes: str, **options: Any) -> dict[str, Any]:
        """Have the changes done in a child, and wait for its end (or its stop)."""
        self.start(path, *changes, **options)
        return self.answer()

    def ask_together(self, path: Path, *changes: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """Have several lists of changes done in as many children at once, and wait for all."""
        self._send({"path": str(path), "together": changes, **options})
        return [self.answer() for _ in changes]

    def start(self, path: Path, *changes: str, **options: Any) -> None:
        self._send({"path": str(path), "changes": changes, **options})

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def answered(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def go_on(self, pid: int) -> dict[str, Any]:
        """Let a stopped child run to its end."""
        os.kill(pid, signal.SIGCONT)
        self._send({"wait": pid})
        return self.answer()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)


# --- in the second process -----------------------------------------------------------------------------------------


class Counter:
    """Counts the writing operations of this process in a directory, and does something at one of them."""

    def __init__(self, path: str, at: int | list[str] | None, how: str) -> None:
        """`at` is a number, or an operation and how the name of what it makes ends."""
        self.path, self.at, self.how, self.events = path, at, how, list[str]()
        self.room = 0  # with "no room": how many files may be made, one for each that was removed
        self._fsync, os.fsync = os.fsync, self._synced
        sys.addaudithook(self._happened)

    def _happened(self, event: str, arguments: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event == "fcntl.flock" or ((writing or event in EVENTS) and str(arguments[0]).startswith(self.path)):
            if isinstance(self.at, list) and event == self.at[0] and str(arguments[1]).endswith(self.at[1]):
                self.at = self.count + 1
            self._step(event)
            if self.how == "no room":
                self._use(event, arguments)

    def _use(self, event: str, arguments: tuple[Any, ...]) -> None:
        """A full disk: a file can be made when another one was removed, or the lock was emptied."""
        there = os.path.isfile(arguments[0]) and os.stat(arguments[0]).st_nlink == 1
        if (event == "os.remove" and there) or (event == "os.truncate" and os.stat(arguments[0]).st_size):
            self.room += 1
        elif event == "open" and arguments[2] & os.O_CREAT and not os.path.lexists(arguments[0]):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= 1

    @property
    def count(self) -> int:
        return len(self.events)

    def _synced(self, descriptor: int) -> None:
        self._step("fsync")
        self._fsync(descriptor)

    def _step(self, event: str) -> None:
        self.events.append(event)
        if not isinstance(self.at, int) or self.count < self.at:
            return
        if self.how == "full" and event != "os.remove":  # from here on, as a full disk stays full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.count == self.at and self.how in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, self.how))


def _limit_files(size: int, deadly: bool) -> None:
    """No file may grow beyond a size: the write that tries ends the process, or fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _no_links(*_: object) -> None:
    """As of a file system without hard links."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _child(request: dict[str, Any], pipe: int) -> None:
    how, at = request.get("how", "SIGKILL"), request.get("at")
    if "user" in request:
        os.setuid(request["user"])
    if how in ("SIGXFSZ", "EFBIG"):
        _limit_files(at, how == "SIGXFSZ")
    if request.get("unlocked"):
        filelock.FileLock.acquire = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        filelock.FileLock.release = lambda *_, **__: None  # type: ignore[method-assign]
    if request.get("linkless"):
        os.link = _no_links  # type: ignore[assignment]
    counter = Counter(request["path"], at, how)
    os.write(pipe, b"\n")
    told: dict[str, Any] = {"error": None, "done": []}
    started = time.perf_counter()
    for what in request["changes"]:
        try:
            change(Path(request["path"]), what)
            told["done"].append(what)
        except Exception as error:
            told |= {"error": type(error).__name__, "message": str(error)}
            if "go_on" not in request:
                break
    told |= {"events": counter.events, "count": counter.count, "seconds": time.perf_counter() - started}
    os.write(pipe, json.dumps(told).encode())


def _wait(pid: int, pipe: int) -> dict[str, Any]:
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return {"stopped": pid}
    told = b"".join(iter(lambda: os.read(pipe, 65536), b""))
    os.close(pipe)
    return {"pid": pid, "killed": os.WIFSIGNALED(status)} | (json.loads(told) if told.strip() else {})


def _serve() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # the first time everything is compiled and imported
        for what in ("create", "learn a 1", "learn b 2", "remove a", "rollback"):
            change(Path(folder, "model"), what)
        whole(Path(folder, "model"))
    pipes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            children = [request["wait"]]
        elif "together" in request:
            children = [_fork(request | {"changes": changes}, pipes) for changes in request["together"]]
        else:
            children = [_fork(request, pipes)]
        if "after" in request:
            time.sleep(request["after"])
            os.kill(children[0], signal.SIGKILL)
        for pid in children:
            print(json.dumps(_wait(pid, pipes[pid])), flush=True)


def _fork(request: dict[str, Any], pipes: dict[int, int]) -> int:
    """The process id of a child that has started."""
    ours, its = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(request, its)
        os._exit(0)
    os.close(its)
    os.read(ours, 1)
    pipes[pid] = ours
    return pid


if __name__ == "__main__":
    _serve()
