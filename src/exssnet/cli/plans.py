"""What `exssnet run` was told, as the configurations of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from exssnet.cli.console import tell
from exssnet.errors import InputError

if TYPE_CHECKING:
    from exssnet.experiments.config import RunConfig


def named(benchmark: str, stream: Path | None) -> str:
    """The benchmark, or the file of a stream."""
    if stream is None:
        return benchmark
    if benchmark:
        raise InputError(f"both {benchmark} and --stream are given: give one of them")
    if stream.suffix not in (".yaml", ".yml"):
        raise InputError(f"--stream {stream} is not a YAML file: give one that lists tasks, files and columns")
    return str(stream)


def repeated(config: Path, others: list[Any]) -> list[RunConfig]:
    """Plan the run of a config.yaml."""
    from exssnet.experiments.config import RunConfig

    if any(other is not None and other is not False and other != "" for other in others):  # 0 is a setting
        raise InputError("--config repeats a run: remove the benchmark and all other settings")
    return [RunConfig.read(config)]


def planned(benchmark: str, methods: str, kkt: bool, seeds: str, changes: dict[str, Any]) -> list[RunConfig]:
    """Plan the runs; all of them are resolved before the first one starts."""
    from exssnet.experiments.config import resolve_all
    from exssnet.methods import general as known
    from exssnet.methods import transfers

    if not benchmark:
        raise InputError("no benchmark given: `exssnet list benchmarks` lists them")
    names = []
    for name in (part.strip() for part in methods.split(",")):
        some = [name] if name != "all" else [one for one in known() if not kkt or transfers(one)]
        names += [one.removesuffix("+kkt") + "+kkt" for one in some] if kkt else some
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds is '{seeds}': give comma-separated whole numbers, for example 0,1,2") from None
    heads = [head.strip() for head in changes.pop("head").split(",")] if changes.get("head") else []
    for what, given in (("method", names), ("seed", [str(number) for number in numbers]), ("head", heads)):
        twice = [value for value in given if value and given.count(value) > 1]
        if twice:
            raise InputError(f"{what} {twice[0]} is given twice: give each once")
    if not heads:
        return resolve_all(benchmark, names, numbers, **changes)
    plans = {p.folder: p for head in heads for p in resolve_all(benchmark, names, numbers, **changes, head=head)}
    fitting = {plan.method for plan in plans.values() if plan.head in heads}
    other = sorted({f"{plan.method} ({plan.head})" for plan in plans.values() if plan.method not in fitting})
    if other:
        tell(f"these methods do not have head {' or '.join(heads)} and use their own: {', '.join(other)}")
    return [plan for plan in plans.values() if plan.head in heads or plan.method not in fitting]


def pairs(settings: list[str]) -> dict[str, Any]:
    """Settings written as name=value."""
    from exssnet.experiments.config import settings_from_text

    for setting in settings:
        if "=" not in setting:
            raise InputError(f"--set {setting} has no value: write --set name=value")
    return settings_from_text(dict(setting.split("=", 1) for setting in settings))
