"""The configuration of a run: a recipe of its benchmark and method, with what the user changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from exssnet.errors import InputError, RunError
from exssnet.experiments.benchmarks import recipe

SHARED_RECIPE_FIELDS = ("source", "stream", "tasks", "class_order", "network", "batch_size", "threads")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's result. `settings` are the method's own."""

    benchmark: str
    method: str  # with KKT `exssnet+kkt`
    seed: int
    source: str
    stream: str
    tasks: int
    network: str
    class_order: str = "natural"  # seed, natural, or a list such as 3,1,0,2
    class_order_seed: int = 0
    validation: float = 0.0  # share of each class's training data held out
    samples_per_class: int | None = None  # a miniature: so many training images of each class
    images: str | None = None  # an image folder instead of the hub, for split-imagenet
    width: float | None = None
    head: str = "shared"
    batch_size: int = 64
    optimizer: str = "adam"
    select: str = "last"
    device: str = "auto"
    threads: int = 0  # CPU threads; 0: as many as PyTorch takes
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the run lies below the output folder."""
        return Path(self.benchmark, self.method, f"seed-{self.seed}")

    def to_yaml(self) -> str:
        import yaml

        text: str = yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, allow_unicode=True)
        return text

    @staticmethod
    def from_yaml(text: str, where: str) -> RunConfig:
        import yaml

        try:
            return RunConfig(**yaml.safe_load(text))
        except (yaml.YAMLError, TypeError) as error:
            raise RunError(f"{where} is no run configuration: {' '.join(str(error).split())}") from error

    def differences(self, other: RunConfig) -> list[str]:
        """Names of the fields that differ, settings included."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        fields = [name for name in mine if name != "settings" and mine[name] != theirs[name]]
        names = mine["settings"].keys() | theirs["settings"].keys()
        return fields + sorted(n for n in names if mine["settings"].get(n) != theirs["settings"].get(n))


def resolve(benchmark: str, method: str, seed: int, **changes: Any) -> RunConfig:
    """The benchmark's recipe for a method, with changes (None: not changed); unknown names are refused."""
    from exssnet.methods import parse

    base = recipe(benchmark)
    kind, kkt = parse(method)
    changes = {name: value for name, value in changes.items() if value is not None}
    config_fields = {f.name for f in dataclasses.fields(RunConfig)} - {"benchmark", "method", "seed", "settings"}
    own = base["methods"].get(kind.name, {}) | ({"kkt": True} if kkt else {})
    setting_fields = {f.name for f in dataclasses.fields(kind.settings_type)}
    for name, value in changes.items():
        if name in setting_fields:
            own[name] = value
        elif name not in config_fields:
            raise InputError(f"method '{method}' has no setting '{name}'")
    shared = {name: base[name] for name in SHARED_RECIPE_FIELDS if name in base}
    shared |= {name: value for name, value in changes.items() if name in config_fields}
    shared.setdefault("class_order_seed", seed)
    settings = _typed(kind.settings_type, own)
    if shared.get("threads", 0) < 0:
        raise InputError(f"threads is {shared['threads']}: give 1 or more, or 0 for PyTorch's choice")
    config = RunConfig(benchmark=benchmark, method=method, seed=seed, settings=settings, **shared)
    return dataclasses.replace(config, device=_device(config.device))


def _typed(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """All settings, checked by the method's own type; whole numbers given for floats become floats."""
    hints = get_type_hints(kind)
    settings = kind(**{n: float(v) if hints[n] is float else v for n, v in values.items()})
    return dataclasses.asdict(settings)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device '{name}' is not known: give auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device '{name}' is not there: this machine has no CUDA device, give cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device '{name}' is not supported: give auto, cpu or cuda")
    return name
