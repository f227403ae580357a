"""Many runs: one after the other, or several at once on one GPU, each on a stream of its own.

A run of small layers leaves most of a GPU idle; the graph replays of several runs fill it. Runs share the data set's
tensors and what was compiled, neither of which they change, so each one's record is what it is when the run is alone.
Not so if a module draws random numbers itself, from the device's one generator: no network of ours does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from exssnet.engine.cuda.gpu_lock import taking_turns
from exssnet.errors import InputError
from exssnet.experiments.config import RunConfig, reads_from_disk
from exssnet.train.listener import Forwarding, Listener

AT_ONCE = 8  # with `auto`, on a GPU
MOST = 28  # PyTorch has 32 streams to give; steps are captured on two of them


def how_many(wanted: str, configs: Sequence[RunConfig]) -> int:
    """Runs at a time: a number, or `auto`."""
    gpu = all(config.device.startswith("cuda") for config in configs)
    from_disk = next((config for config in configs if _reads_from_disk(config)), None)
    if wanted == "auto":
        return min(AT_ONCE, len(configs)) if gpu and not from_disk else 1
    if not wanted.isdecimal() or int(wanted) < 1:
        raise InputError(f"together is '{wanted}': give auto or a whole number, at least 1")
    if int(wanted) > 1 and not gpu:
        raise InputError(f"together {wanted} is for a GPU: on a CPU start several commands, or leave it at auto")
    if int(wanted) > 1 and from_disk:
        raise InputError(
            f"together {wanted}: {from_disk.benchmark} reads its images while it trains, and such steps cannot run "
            f"beside others: leave it at auto"
        )
    if int(wanted) > MOST:
        raise InputError(f"together {wanted} is too many: at most {MOST}, and 8 or so fill a GPU")
    return min(int(wanted), len(configs))


def _reads_from_disk(config: RunConfig) -> bool:
    return reads_from_disk(config.stream, config.source, config.images)


def refuse_early(configs: Sequence[RunConfig], out: Path) -> None:
    """Raise now what one of several runs would raise when its turn comes: of every method and head one is prepared."""
    from exssnet.experiments.run import computing, prepare
    from exssnet.experiments.run_folder import RunFolder

    if len(configs) == 1:
        return
    for config in configs:
        RunFolder(out, config).check()
    unfinished = [config for config in configs if RunFolder(out, config).results() is None]
    for config in {config.folder.parent: config for config in unfinished}.values():
        with computing(config):
            prepare(config)


def run_all(
    configs: Sequence[RunConfig],
    out: Path,
    listeners: Sequence[Listener],
    checkpoint_seconds: float,
    together: int = 1,
) -> list[dict[str, Any]]:
    """Make all runs, so many at a time; their records, in order."""
    from exssnet.experiments.run import run

    def one(config: RunConfig, listener: Listener) -> dict[str, Any]:
        return run(config, out, listener, checkpoint_seconds)

    return each(one, configs, listeners, together)


def each(
    one: Callable[[RunConfig, Listener], dict[str, Any]],
    configs: Sequence[RunConfig],
    listeners: Sequence[Listener],
    together: int = 1,
) -> list[dict[str, Any]]:
    """What `one` makes of every configuration, so many at a time, in order."""
    if together == 1:
        return [one(config, listener) for config, listener in zip(configs, listeners, strict=True)]
    import torch

    from exssnet.core.module.skeleton import prepare_compiler
    from exssnet.experiments.recipes import stream
    from exssnet.experiments.run import computing

    if any(config.compile == "on" for config in configs):
        prepare_compiler()
    for config in configs:
        stream(config)[0].train.to(config.device)  # the shared copy of the data, before any stream reads it
        torch.cuda.synchronize(config.device)
    stop, mine = threading.Event(), threading.local()

    def have_a_stream() -> None:  # for all runs of a thread: there are not so many that each run could have one
        mine.stream = torch.cuda.Stream(configs[0].device)  # type: ignore[no-untyped-call]

    def on_a_stream(config: RunConfig, listener: Listener) -> dict[str, Any]:
        with taking_turns(), torch.cuda.stream(mine.stream):
            return one(config, Stoppable(listener, stop))

    # the settings of the libraries are the whole process's: they stay until the last run has ended
    with computing(configs[0]), ThreadPoolExecutor(together, initializer=have_a_stream) as pool:
        runs = [pool.submit(on_a_stream, *pair) for pair in zip(configs, listeners, strict=True)]
        try:
            wait(runs, return_when=FIRST_EXCEPTION)
            failed = next((run for run in runs if run.done() and run.exception() is not None), None)
            if failed is not None:
                failed.result()  # raises
            return [run.result() for run in runs]
        except BaseException:
            stop.set()  # the others end at their next step; what they have is in their checkpoints
            pool.shutdown(cancel_futures=True)
            raise


class Stoppable(Forwarding):
    """Passes everything on until it is told to stop; then the run that reports to it ends."""

    def __init__(self, listener: Listener, stop: threading.Event) -> None:
        super().__init__(listener)
        self._stop = stop

    def progress(self, share: float) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        super().progress(share)
