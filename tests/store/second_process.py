"""A second process that changes model directories and can be cut off at any moment.

A server that has imported and warmed up everything forks a child for every request, so a kill costs milliseconds.
Moments are counted in writing operations of the child: opening to write, locking, renaming, removing, syncing.
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
from pathlib import Path
from typing import Any

import torch

import exssnet
from exssnet.store.folder import Folder
from exssnet.store.model import StoredModel
from exssnet.store.verify import verify

ROOT = Path(__file__).parents[2]
EVENTS = ("os.rename", "os.remove", "os.mkdir", "fcntl.flock")
State = tuple[tuple[str, str, bytes], ...]


def examples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(40) % 2
    return torch.rand(40, 8, generator=torch.Generator().manual_seed(seed)) + labels[:, None], labels


def change(path: Path, what: str) -> None:
    """Do "learn NAME SEED", "remove NAME", "rename NAME TO", "rollback" or "create"."""
    match what.split():
        case ["create"]:
            exssnet.Model.create(path, "lenet-300-100", input=(8,), width=0.05)
        case ["learn", name, seed]:
            exssnet.Model.open(path).learn(name, examples(int(seed)), epochs=(1, 1))
        case ["remove", name]:
            exssnet.Model.open(path).remove(name)
        case ["rename", name, to]:
            exssnet.Model.open(path).rename(name, to)
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

    def __init__(self, path: str, at: int | None, how: str) -> None:
        self.path, self.at, self.how, self.count = path, at, how, 0
        self._fsync, os.fsync = os.fsync, self._synced
        sys.addaudithook(self._happened)

    def _happened(self, event: str, arguments: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event == "fcntl.flock" or ((writing or event in EVENTS) and str(arguments[0]).startswith(self.path)):
            self._step(event)

    def _synced(self, descriptor: int) -> None:
        self._step("fsync")
        self._fsync(descriptor)

    def _step(self, event: str) -> None:
        self.count += 1
        if self.at is None or self.count < self.at:
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


def _child(request: dict[str, Any], pipe: int) -> None:
    how, at = request.get("how", "SIGKILL"), request.get("at")
    if "user" in request:
        os.setuid(request["user"])
    if how in ("SIGXFSZ", "EFBIG"):
        _limit_files(at, how == "SIGXFSZ")
    counter = Counter(request["path"], at, how)
    os.write(pipe, b"\n")
    told: dict[str, Any] = {"error": None}
    started = time.perf_counter()
    try:
        for what in request["changes"]:
            change(Path(request["path"]), what)
    except Exception as error:
        told = {"error": type(error).__name__, "message": str(error)}
    os.write(pipe, json.dumps(told | {"count": counter.count, "seconds": time.perf_counter() - started}).encode())


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
    pipes = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" not in request:
            ours, its = os.pipe()
            pid = os.fork()
            if pid == 0:
                _child(request, its)
                os._exit(0)
            os.close(its)
            os.read(ours, 1)  # it has started
            pipes[pid] = ours
            if "after" in request:
                time.sleep(request["after"])
                os.kill(pid, signal.SIGKILL)
        else:
            pid = request["wait"]
        print(json.dumps(_wait(pid, pipes[pid])), flush=True)


if __name__ == "__main__":
    _serve()
