"""`exssnet` commands as processes of their own, forked from one that has imported torch already: 0.1 s instead of 5."""

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from io import StringIO, TextIOWrapper
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

SLOW = (
    "PIL.ImageOps", "constriction", "exssnet.cli.main", "exssnet.engine.cpu.selection",
    "exssnet.cli.compare_tables", "exssnet.experiments.run", "exssnet.experiments.together",
    "exssnet.methods.masks.exssnet", "exssnet.models.lenet", "exssnet.store.predictions", "exssnet.store.stored_model",
    "exssnet.cli.run_display", "exssnet.cli.model_display", "exssnet.cli.progress", "pyarrow.parquet",
    "scipy.special", "sklearn.datasets", "sklearn.neighbors", "torch._dynamo", "torch.onnx", "torch.profiler",
    "typer.main",
)  # fmt: skip


PROGRESS = re.compile(r"[^\n]+: (task \d+/\d+ )?\w+ \d+/\d+[^\n]* % done(, [^\n]+ left)?\n")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """Standard error without lines of progress."""
        return "".join(line for line in self.stderr.splitlines(True) if not PROGRESS.fullmatch(line))


class Forks:
    """Starts commands, and waits for them."""

    def __init__(self) -> None:
        self._outputs = TemporaryDirectory()
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )  # fmt: skip

    def start(
        self, *arguments: object, cwd: Path | None = None, program: Path | None = None, without: str = "",
        stdout: str = "", closed: Sequence[int] = (), encoding: str = "utf-8", **environment: str,
    ) -> int:  # fmt: skip
        """The process id of a command, or of a Python program.

        `without`: a package that is not installed there. `stdout`: a file that takes its output, in this `encoding`.
        `closed`: standard streams that are closed when it starts.
        """
        asked = {
            "start": [str(argument) for argument in arguments], "cwd": str(cwd or Path.cwd()), "without": without,
            "outputs": self._outputs.name, "environment": environment, "program": program and str(program),
            "stdout": stdout, "closed": closed, "encoding": encoding,
        }  # fmt: skip
        return self._ask(asked)

    def wait(self, process: int) -> Done:
        code = self._ask({"wait": process})
        out, err = (Path(self._outputs.name, f"{process}.{name}").read_bytes() for name in ("out", "err"))
        return Done(code, out.decode(errors="surrogateescape"), err.decode())

    def __call__(self, *arguments: object, **options: Any) -> Done:
        return self.wait(self.start(*arguments, **options))

    def close(self) -> None:
        self._server.communicate(timeout=60)
        self._outputs.cleanup()

    def _ask(self, question: dict) -> int:
        print(json.dumps(question), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


def serve() -> None:
    for name in SLOW:
        import_module(name)
    sys.argv = ["exssnet", "list", "methods"]
    with redirect_stdout(StringIO()), suppress(SystemExit):
        import_module("exssnet.cli.main").main()  # what a command imports before it does anything
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
            continue
        process = os.fork()
        if process == 0:
            run(asked)
        print(process, flush=True)
    os._exit(0)


def run(asked: dict) -> None:
    """In the fork: the command, from its arguments to its exit code."""
    from exssnet.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us without
    os.chdir(asked["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, place in (("out", 1), ("err", 2)):
        file = Path(asked["outputs"], f"{os.getpid()}.{name}")
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), place)
    if asked["stdout"]:
        os.dup2(os.open(asked["stdout"], os.O_WRONLY), 1)
    sys.stdout = TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding=asked["encoding"])
    for number in asked["closed"]:  # as the interpreter finds it
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    os.environ.update(asked["environment"])
    if asked["without"]:
        sys.modules[asked["without"]] = None
    sys.argv = [asked["program"] or "exssnet", *asked["start"]]
    code = 0
    try:
        if asked["program"]:
            sys.path[0] = str(Path(asked["program"]).parent)
            run_path(asked["program"], run_name="__main__")
        else:
            main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
