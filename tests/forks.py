"""`exssnet` commands as processes of their own, forked from one that has imported torch already: 0.1 s instead of 5."""

import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

SLOW = (
    "PIL.ImageOps", "constriction", "exssnet.cli", "exssnet.core.selection_numba", "exssnet.methods.exssnet",
    "exssnet.models.lenet", "exssnet.store.ask", "exssnet.store.model", "exssnet.terminal", "exssnet.terminal_model",
    "pyarrow.parquet", "sklearn.neighbors", "torch._dynamo", "torch.onnx", "torch.profiler", "typer.main",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Forks:
    """Starts commands, and waits for them."""

    def __init__(self) -> None:
        self._outputs = TemporaryDirectory()
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        )  # fmt: skip

    def start(self, *arguments: object, cwd: Path | None = None) -> int:
        """The process id of a command."""
        asked = {"start": [str(argument) for argument in arguments], "cwd": str(cwd or Path.cwd())}
        return self._ask(asked | {"outputs": self._outputs.name})

    def wait(self, process: int) -> Done:
        code = self._ask({"wait": process})
        return Done(code, *(Path(self._outputs.name, f"{process}.{name}").read_text() for name in ("out", "err")))

    def __call__(self, *arguments: object, cwd: Path | None = None) -> Done:
        return self.wait(self.start(*arguments, cwd=cwd))

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
        import_module("exssnet.cli").main()  # what a command imports before it does anything
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
    from exssnet.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us without
    os.chdir(asked["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, place in (("out", 1), ("err", 2)):
        file = Path(asked["outputs"], f"{os.getpid()}.{name}")
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), place)
    sys.argv = ["exssnet", *asked["start"]]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
