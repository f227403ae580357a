"""Export and import of tasks: as a state_dict, a program or a model directory."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from exssnet.core.proof import digests_of
from exssnet.errors import InputError, ParseError, StoreError
from exssnet.io import parse
from exssnet.io.disk import temporary, write_all_atomic
from exssnet.store.baked import baked, scaling_of, state_of
from exssnet.store.directory import holds
from exssnet.store.format import card as cards
from exssnet.store.format.task_files import unlike

if TYPE_CHECKING:
    from exssnet.core.network import MaskedNetwork
    from exssnet.store.stored_model import StoredModel

STATES = ("safetensors", "torch")  # files with a state_dict and a .json
FORMATS = (*STATES, "onnx", "pt2", "model")
TOLERANCE = 1e-4  # between PyTorch and onnxruntime, relative to the largest output
MOST_BYTES = 2**36  # of an exported file
RAW, SCALED = "raw", "scaled"


def export(model: StoredModel, task: str, path: Path, format: str) -> nn.Module:
    """Export one task; return the module that computes it from raw inputs."""
    if format not in FORMATS:
        raise InputError(f"format is '{format}': choose one of {', '.join(FORMATS)}")
    card, details = model.card(task), _facts(model, task)
    described = {_described(path): _description(model, card, details)} if format in STATES else {}
    _require_free(path, described)
    module = model.bake(task).cpu()
    if format == "model":
        _as_directory(model, task, path)
        return module
    content = {
        "safetensors": lambda: save(state_of(module)), "torch": lambda: _as_torch(module),
        "onnx": lambda: _as_onnx(module, card, details), "pt2": lambda: _as_program(module, card, details),
    }[format]()  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_all_atomic({**described, path: content})
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error
    return module


def _described(path: Path) -> Path:
    """The .json file that describes a state_dict."""
    return path.with_name(f"{path.name}.json")


def _description(model: StoredModel, card: Mapping[str, Any], details: Mapping[str, Any]) -> bytes:
    scaling = scaling_of(card)
    description = {
        **details,
        **({"inputs": SCALED, "scaling": scaling} if scaling else {"inputs": RAW}),
        "card": {**card, "source": None},
        "base": {"first": model.base.first, "structure": list(model.base.structure)},
    }
    return (json.dumps(description, indent=1, ensure_ascii=False) + "\n").encode()


def _require_free(path: Path, described: Mapping[Path, bytes]) -> None:
    """Refuse to overwrite a file, unless it is the same description, left by a killed export."""
    for file in (path, *described):
        if os.path.lexists(file) and not (file in described and holds(file, described[file])):
            raise InputError(f"{file} exists: choose another name, or remove it")


def load_exported(path: str | Path) -> nn.Module:
    """Load a task that was exported as `safetensors` from a built-in network, as a module from raw inputs to logits."""
    from exssnet.models import build

    path = Path(path)
    details, state = _read(path)
    if details["network"] is None:
        raise InputError(f"{path} was exported from your own network: load the state_dict into it yourself")
    network = build(details["network"], details["input"], len(details["labels"]), details["width"])
    network.load_state_dict(state)
    return baked(network.eval(), {"scaling": details.get("scaling", {}), "recipe": details["recipe"]}, True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description of an exported task, and its state_dict."""
    try:
        details = parse.json_file(_described(path), dict[str, Any])
        return details, load(parse.read_safetensors(path, MOST_BYTES))
    except (OSError, ParseError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise StoreError(f"{path} cannot be read as a task exported as safetensors: {why}") from error


def _facts(model: StoredModel, task: str) -> dict[str, Any]:
    """Describe an exported task."""
    found, base = model.task(task), model.base
    return {
        "task": task, "labels": list(found.labels), "accuracy": found.accuracy, "network": base.network,
        "width": base.width, "input": list(found.card["recipe"]["shape"]), "recipe": found.card["recipe"],
        "digest": found.digest,
    }  # fmt: skip


def _as_torch(module: nn.Sequential) -> bytes:
    """Write a file for `torch.load(path, weights_only=True)`."""
    content = io.BytesIO()
    torch.save(state_of(module), content)
    return content.getvalue()


def _as_program(module: nn.Sequential, card: Mapping[str, Any], details: Mapping[str, Any]) -> bytes:
    """Write a file for `torch.export.load(path).module()`: the computation, without classes."""
    program = torch.export.export(
        module, (_inputs(2, card),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
    )  # fmt: skip
    content = io.BytesIO()
    facts = json.dumps({**details, "inputs": RAW}, ensure_ascii=False)
    torch.export.save(program, content, extra_files={"exssnet.json": facts})
    return content.getvalue()


def _as_onnx(module: nn.Sequential, card: Mapping[str, Any], details: Mapping[str, Any]) -> bytes:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'exssnet[onnx]'") from error
    with warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")  # warnings of the exporter
        program = torch.onnx.export(
            module, (_inputs(2, card),), dynamo=True, verbose=False, input_names=["input"],
            output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )  # fmt: skip
    assert program is not None
    found = program.model_proto
    for key, value in {**details, "inputs": RAW}.items():
        text = value if key == "inputs" else json.dumps(value, ensure_ascii=False)
        found.metadata_props.append(onnx.StringStringEntryProto(key=key, value=text))
    content: bytes = found.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    asked = _inputs(3, card)
    with torch.no_grad():
        wanted = module(asked)
    (answer,) = session.run(["logits"], {"input": asked.numpy()})
    away = float((torch.from_numpy(answer) - wanted).abs().max())
    if not away <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise StoreError(f"onnxruntime and PyTorch differ by {away:g}: nothing was written, try --format pt2")
    return content


def _inputs(rows: int, card: Mapping[str, Any]) -> Tensor:
    """Draw raw inputs; for indices, whose largest value is unknown, zeros and ones."""
    draw, recipe = torch.Generator().manual_seed(rows), card["recipe"]
    shape = (rows, *recipe["shape"])
    if recipe.get("dtype") == "int64":
        return torch.randint(0, 2, shape, generator=draw)
    scale: float = scaling_of(card).get("scale", 1.0)
    return torch.rand(shape, generator=draw) / scale


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a library's log about packages that are not installed."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _as_directory(model: StoredModel, task: str, path: Path) -> None:
    """Write a model directory with this task only: created under a temporary name and renamed."""
    made = temporary(path)
    try:
        adopt(type(model).with_base(made, model), model, task, task, source=False)
        made.rename(path)
    except (OSError, StoreError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError):  # its message has the other name
            raise StoreError(f"{path} cannot be written: {cause.strerror}") from error
        raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def adopt(model: StoredModel, other: StoredModel, task: str, name: str, source: bool = True) -> None:
    """Copy a task to another directory with the same base; without its `source` if it may leave this machine."""
    _require_base(model, other.path, other.base.first, other.base.structure)
    found = other.answering(task).network
    card = other.card(task)
    lender = card["task"]["lender"]
    if lender not in [one.name for one in model.tasks] or model.task(lender).digest != other.task(lender).digest:
        card = card | {"task": card["task"] | {"lender": None}}  # missing here, or another task of that name
    if not source:
        card = card | {"source": None}
    mask = found.mask(task)
    masked = torch.cat([tensor.reshape(-1) for tensor in found.effective(task).values()])
    private = {key: tensor.clone() for key, tensor in found.task(task).private.items()}
    model.adopt(card, name, mask, masked, private)


def adopt_file(model: StoredModel, path: Path, name: str | None) -> str:
    """Import a task that was exported as `safetensors` from a directory with the same base; return its name."""
    details, state = _read(path)
    if not isinstance(details.get("card"), dict) or not isinstance(details.get("base"), dict):
        raise StoreError(f"{path}.json does not name the base of its task: export it again")
    _require_base(model, path, details["base"].get("first"), details["base"].get("structure"))
    card = cards.parse(json.dumps(details["card"]).encode(), f"the card in {path}.json")
    network = model.model.network
    digests = card["task"]["digests"]
    own = {key: tensor for key, tensor in state.items() if key in digests}
    if digests_of(own) != digests or cards.identity(card) != card["digest"]:
        raise StoreError(f"{path} does not have the task that {path.name}.json describes: export it again")
    _require_shapes(network, own, card["task"]["classes"], path)
    masked = network.layout.vector(own)
    private = {key: tensor for key, tensor in own.items() if key not in network.layout.names}
    card = card | {"task": card["task"] | {"lender": None}}
    name = name or str(card["task"]["name"])
    model.adopt(card, name, masked != 0, masked, private)  # a weight of zero is the same as one outside the mask
    return name


def _require_shapes(network: MaskedNetwork, own: Mapping[str, Tensor], classes: int, path: Path) -> None:
    """Refuse tensors that match the card but not the network."""
    layers = {layer.name: layer.shape for layer in network.layout.layers}
    private = {name: tensor for name, tensor in own.items() if name not in layers}
    other = unlike(network, private, classes)
    for name, shape in layers.items():
        if name not in own or tuple(own[name].shape) != shape or own[name].dtype != network.weights.dtype:
            other = other or name
    if other:
        raise StoreError(f"{path}: '{other}' does not match the network")


def _require_base(model: StoredModel, where: Path, first: object, structure: object) -> None:
    if first != model.base.first or not isinstance(structure, list | tuple) or tuple(structure) != model.base.structure:
        raise InputError(f"{where} and {model.path} have different bases: tasks cannot be exchanged")
