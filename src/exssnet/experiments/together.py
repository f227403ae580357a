"""Many runs: in sequence, or several at once on one GPU, each on its own CUDA stream.

A run of small layers leaves most of a GPU idle; the graph replays of several runs use it. Runs share the data set's
tensors and compiled code and change neither, so each record is the same as when the run is alone.
This does not hold for modules that draw random numbers from the device's generator; no built-in network does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any

from exssnet.errors import InputError
from exssnet.experiments.config import RunConfig, reads_from_disk
from exssnet.train.listener import Forwarding, Listener

AT_ONCE = 8  # with `auto`, on a GPU
MOST = 28  # PyTorch has a pool of 32 streams; steps are captured on two of them


def how_many(wanted: str, configs: Sequence[RunConfig]) -> int:
    """Number of concurrent runs, from a number or `auto`."""
    from exssnet.methods import parse

    gpu = all(config.device.startswith("cuda") for config in configs)
    from_disk = next((config for config in configs if _reads_from_disk(config)), None)
    large = next((config for config in configs if parse(config.method)[0].trains_encoder), None)
    if wanted == "auto":
        return min(AT_ONCE, len(configs)) if gpu and not from_disk and not large else 1
    if not wanted.isdecimal() or int(wanted) < 1:
        raise InputError(f"--together is '{wanted}': give auto or a whole number from 1")
    if int(wanted) > 1 and not gpu:
        raise InputError(f"--together {wanted} needs a GPU: on a CPU start several commands, or use auto")
    if int(wanted) > 1 and from_disk:
        raise InputError(
            f"--together {wanted} cannot be used with {from_disk.benchmark}, whose images are read from disk during "
            f"training: use auto"
        )
    if int(wanted) > 1 and large:
        raise InputError(
            f"together {wanted}: {large.method} trains a whole encoder, which fills a GPU: leave it at auto"
        )
    if int(wanted) > MOST:
        raise InputError(f"--together {wanted} is too many: give at most {MOST}; about 8 fill a GPU")
    return min(int(wanted), len(configs))


def _reads_from_disk(config: RunConfig) -> bool:
    return reads_from_disk(config.stream, config.source, config.images)


def refuse_early(configs: Sequence[RunConfig], out: Path) -> None:
    """Prepare one run of every method and head, so that errors are raised before the first run starts."""
    from exssnet.experiments.prepare import computing, prepare
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
    """Make all runs, `together` at a time, and return their records in order."""
    from exssnet.experiments.prepare import shared_engines
    from exssnet.experiments.run import run

    engine = shared_engines()

    def one(config: RunConfig, listener: Listener) -> dict[str, Any]:
        return run(config, out, listener, checkpoint_seconds, engine(config))

    return each(one, configs, listeners, together)


def each(
    one: Callable[[RunConfig, Listener], dict[str, Any]],
    configs: Sequence[RunConfig],
    listeners: Sequence[Listener],
    together: int = 1,
) -> list[dict[str, Any]]:
    """Call `one` for every configuration, `together` at a time, and return the results in order."""
    if together == 1:
        return [one(config, listener) for config, listener in zip(configs, listeners, strict=True)]
    import torch

    from exssnet.engine import threads
    from exssnet.experiments.prepare import computing
    from exssnet.experiments.recipes import stream

    for config in configs:
        stream(config)[0].train.to(config.device)  # copy the shared data before any stream reads it
        torch.cuda.synchronize(config.device)
    stop = threading.Event()

    # settings of libraries are global: they stay until the last run has ended
    with computing(configs[0]), threads(configs[0].device, together) as pool:
        pairs = zip(configs, listeners, strict=True)
        runs = [pool.submit(one, config, Stoppable(listener, stop)) for config, listener in pairs]
        try:
            wait(runs, return_when=FIRST_EXCEPTION)
            failed = next((run for run in runs if run.done() and run.exception() is not None), None)
            if failed is not None:
                failed.result()  # raises
            return [run.result() for run in runs]
        except BaseException:
            stop.set()  # the others end at their next step; their checkpoints stay
            pool.shutdown(cancel_futures=True)
            raise


class Stoppable(Forwarding):
    """Passes everything on until `stop` is set; then ends the run."""

    def __init__(self, listener: Listener, stop: threading.Event) -> None:
        super().__init__(listener)
        self._stop = stop

    def progress(self, share: float) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        super().progress(share)
