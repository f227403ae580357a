"""The configuration of a run: the recipe of its benchmark and method, with the user's changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from exssnet.errors import InputError, ParseError, RunError
from exssnet.experiments.recipes import STREAMS, encoder_recipes, own_recipe, recipe
from exssnet.io import parse

if TYPE_CHECKING:
    from exssnet.methods import Method

BY_NAME = ("benchmark", "method", "seed", "settings")  # they identify the run and are not settings
OF_CLASSES = ("class_order", "class_order_seed")  # only for streams that split classes into tasks
STREAM_FILES = (".yaml", ".yml")
ROUTING = ("confident", "one-shot", "binary")
SETTINGS = ("task-incremental", "class-incremental")


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run's result depends on. `settings` belong to the method."""

    benchmark: str
    method: str  # with KKT `exssnet+kkt`
    seed: int
    source: str
    stream: str
    tasks: int
    network: str
    class_order: str = "natural"  # seed, natural, or a list such as 3,1,0,2
    class_order_seed: int = 0
    validation: float = 0.0  # fraction of each class's training data held out
    samples_per_class: int | None = None  # number of training images per class, for a miniature
    images: str | None = None  # a folder of images instead of the hub, for split-imagenet
    encoder: str | None = None  # of texts: a name or a path; auto: the published one, or a random embedding
    sample: int | None = None  # number of training rows per class, of texts
    stream_file: str | None = None  # a stream of a user's own data
    setting: str = "task-incremental"  # class-incremental: tests do not name the task
    routing: str = "confident"  # how the mask methods find it then
    width: float | None = None
    head: str = "auto"  # shared, task or masked-test; auto: the method's default
    batch_size: int = 64
    optimizer: str = "adam"
    weight_decay: float | None = None  # None: the optimizer's default
    schedule: str = "cosine"  # of the learning rate in each phase: cosine, linear, constant or published
    select: str = "last"
    evaluate: str = "all"  # all: after each task all tasks so far; ends: the new one, and all of them at the end
    device: str = "auto"
    precision: str = "auto"  # bf16 on a GPU, fp32 on a CPU
    compile: str = "auto"  # on: the training step goes through torch.compile, on a GPU
    threads: int = 0  # number of CPU threads; 0: PyTorch chooses
    code: str | None = None  # SHA-256 of the plugin file of the method
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Path of the run below the output folder; a head other than the method's default is part of it."""
        from exssnet.methods import parse

        default = self.head == parse(self.method)[0].heads[0]
        return Path(self.benchmark, self.method if default else f"{self.method}@{self.head}", f"seed-{self.seed}")

    def to_yaml(self) -> str:
        import yaml

        text: str = yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, allow_unicode=True)
        return text

    @staticmethod
    def read(file: Path, inside: Path | None = None) -> RunConfig:
        """Read a configuration and check it like a new one; `inside`: the folder that must contain it."""
        try:
            content = parse.read(file, parse.YAML.size, inside)
            found = parse.typed(parse.from_yaml(content, str(file)), RunConfig, str(file), strict=True)
            values = dataclasses.asdict(found)
            named = {name: values.pop(name) for name in BY_NAME}
            settings = named.pop("settings")
            settings.pop("kkt", None)  # follows from the method's name
            if values["stream_file"] is None:
                recipe(named["benchmark"])  # must be known; its current content does not matter
            return _built(**named, values=values | settings)
        except InputError as error:
            said = str(error)
            said = said if len(said) < 600 else f"{said[:300]}...{said[-200:]}"  # it quotes values that may be long
            raise RunError(f"{file} cannot be used: {said}") from error
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error.strerror}") from error
        except ParseError as error:
            raise RunError(f"{error} (give a run's config.yaml)") from error

    def differences(self, other: RunConfig) -> list[str]:
        """Names of the fields that differ, settings included."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        fields = [name for name in mine if name != "settings" and mine[name] != theirs[name]]
        names = mine["settings"].keys() | theirs["settings"].keys()
        return fields + sorted(n for n in names if mine["settings"].get(n) != theirs["settings"].get(n))


def resolve(benchmark: str, method: str, seed: int, /, **changes: Any) -> RunConfig:
    """Apply changes to the benchmark's recipe for a method (None: unchanged); unknown names are refused.

    A path to a .yaml file is a stream of a user's own data.
    """
    from exssnet.methods import parse

    if Path(benchmark).suffix in STREAM_FILES:
        benchmark, given = own_recipe(Path(benchmark).expanduser())
    else:
        given = dict(recipe(benchmark))
    given.pop("description")
    kind, _ = parse(method)
    recipes = given.pop("methods")
    common = {name: value for name, value in recipes.get("*", {}).items() if knows(kind, name)}
    given |= common | recipes.get(kind.name, {})
    if kind.trains_encoder:
        given |= {"network": "encoder"} | encoder_recipes().get(kind.name, {})
    changes = {name: value for name, value in changes.items() if value is not None}
    own_optimizer = given.get("optimizer", RunConfig.optimizer)
    if "epochs" in changes:
        changes = kind.settings_type.of_epochs(typed("epochs", changes.pop("epochs"), int)) | changes
    if changes.get("optimizer", own_optimizer) != own_optimizer:
        given.pop("weight_decay", None)  # it belongs to the recipe's optimizer
    if given["stream"] == "split":
        given.setdefault("class_order_seed", seed)
    return _built(benchmark, method, seed, given | changes)


def resolve_all(benchmark: str, methods: Sequence[str], seeds: Sequence[int], /, **changes: Any) -> list[RunConfig]:
    """Resolve every method with every seed; a change that no method knows is refused."""
    from exssnet.methods import parse

    kinds = {method: parse(method)[0] for method in methods}
    given = {name: value for name, value in changes.items() if value is not None}

    def fitting(kind: type[Method]) -> dict[str, Any]:
        known = ("epochs", *get_type_hints(RunConfig))
        fits = {n: v for n, v in given.items() if n in known or knows(kind, n)}
        if fits.get("head") not in (None, *kind.heads):
            fits.pop("head")
        return fits

    for name in given:
        if not any(name in fitting(kind) for kind in kinds.values()):
            resolve(benchmark, methods[0], seeds[0], **{name: given[name]})  # raises the error
    return [resolve(benchmark, method, seed, **fitting(kinds[method])) for method in methods for seed in seeds]


def knows(kind: type[Method], setting: str) -> bool:
    """Whether a method has a setting of this name."""
    return setting != "kkt" and setting in setting_types(kind)


def setting_types(kind: type[Method]) -> dict[str, Any]:
    """A method's settings by name, with their types."""
    hints = get_type_hints(kind.settings_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind.settings_type)}


def _built(benchmark: str, method: str, seed: int, values: Mapping[str, Any]) -> RunConfig:
    """Build a configuration from fields and settings, each checked."""
    from exssnet.methods import parse, plugged_from
    from exssnet.methods.masks._base import Isolated
    from exssnet.methods.text._base import AllClasses

    kind, kkt = parse(method)
    seed = typed("seed", seed, int)
    fields = {name: hint for name, hint in get_type_hints(RunConfig).items() if name not in BY_NAME}
    setting_fields = setting_types(kind)
    settings: dict[str, Any] = {}
    if "kkt" in setting_fields:
        setting_fields.pop("kkt")
        settings["kkt"] = kkt
    shared: dict[str, Any] = {}
    for name, value in values.items():
        if name in BY_NAME:
            raise InputError(f"{name} is not a setting: it identifies the run")
        if name in setting_fields:
            settings[name] = typed(name, value, setting_fields[name])
        elif name in fields:
            shared[name] = typed(name, value, fields[name])
        else:
            raise InputError(f"method '{method}' has no setting '{name}'")
    if shared["stream"] != "split":
        for name in OF_CLASSES:
            if shared.get(name, getattr(RunConfig, name)) != getattr(RunConfig, name):
                said = "fixed tasks" if shared["stream"] in ("text", "files") else "all classes in every task"
                raise InputError(f"{name} cannot be set: {benchmark} has {said}")
    if shared.setdefault("head", "auto") == "auto":
        shared["head"] = kind.heads[0]
    _choice("head", shared["head"], kind.heads)
    if kind.remembers and reads_from_disk(shared["stream"], shared["source"], shared.get("images")):
        raise InputError(
            f"{method} cannot run on {benchmark}: it stores examples, and images are read from disk during training"
        )
    _check_texts(benchmark, shared)
    if kind.trains_encoder and shared.get("encoder") is None:
        raise InputError(f"method '{method}' trains an encoder of texts, and {benchmark} has no texts: leave it out")
    _choice("setting", shared.get("setting", RunConfig.setting), SETTINGS)
    if shared.get("setting") == SETTINGS[1] and not issubclass(kind, Isolated | AllClasses):
        raise InputError(
            f"method '{method}' has no masks to find the task by, and does not answer among all classes: "
            f"setting {SETTINGS[1]} needs one of them"
        )
    shared["code"] = plugged_from(kind)
    made = dataclasses.asdict(kind.settings_type(**settings))
    return _checked(RunConfig(benchmark=benchmark, method=method, seed=seed, settings=made, **shared))


def reads_from_disk(stream: str, source: str, images: str | None) -> bool:
    """Whether examples are decoded while a run trains."""
    from exssnet.data.benchmarks.registry import find_source

    return images is not None or (stream not in ("text", "files") and find_source(source).lazy)


def _check_texts(benchmark: str, fields: dict[str, Any]) -> None:
    """Settings that only texts have, and those that they do not have; settles which encoder `auto` is."""
    texts = fields["stream"] == "text" or (fields["stream"] == "files" and fields["source"] == "text")
    if fields.get("samples_per_class") is not None and (texts or fields["stream"] == "files"):
        raise InputError(f"{benchmark} takes no samples_per_class: give --sample")
    if fields.get("sample") is not None and not texts and fields["stream"] != "files":
        raise InputError(f"{benchmark} takes no sample: give --samples-per-class")
    if fields.get("sample") is not None and fields["sample"] < 1:
        raise InputError(f"sample is {fields['sample']}: give at least 1 row a class")
    if not texts and fields.get("encoder") is not None:
        raise InputError(f"{benchmark} has no texts: it takes no encoder")
    if texts and fields.get("encoder") in (None, "auto"):
        from exssnet.encoders.found import automatic

        fields["encoder"] = automatic()


def _checked(config: RunConfig) -> RunConfig:
    from exssnet.engine import resolve as resolve_engine

    if config.stream not in STREAMS:
        raise InputError(f"stream is '{config.stream}': choose one of {', '.join(STREAMS)}")
    if not 0 <= config.threads <= 1024:
        raise InputError(f"threads is {config.threads}: give 1 to 1024, or 0 to let PyTorch choose")
    _choice("evaluate", config.evaluate, ("all", "ends"))
    _choice("routing", config.routing, ROUTING)
    device = _device(config.device)
    precision, compiled = resolve_engine(device, config.precision, config.compile)
    return dataclasses.replace(config, device=device, precision=precision, compile=compiled)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} is '{value}': choose one of {', '.join(choices)}")


def typed(name: str, value: Any, hint: Any) -> Any:
    """Check the type of a value; a whole number may stand for a float, nothing else is converted."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if any(type(value) is kind for kind in kinds):
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise InputError(f"{name} is {value!r}: give a value of type {wanted}")


def settings_from_text(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Parse values of a command line as YAML: numbers, booleans, words."""
    import yaml

    found = {}
    for name, text in pairs.items():
        try:
            found[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(f"{name} is '{text}': it cannot be read as YAML") from None
    return found


def _device(name: str) -> str:
    import torch

    from exssnet.engine import before_cuda

    before_cuda()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device '{name}' is unknown: give auto, cpu or cuda") from None
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise InputError(f"device '{name}' is not supported: give auto, cpu or cuda")
    if (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"device '{name}' does not exist: {count} CUDA devices were found, give auto or cpu")
    return name
