"""Tasks in and out of a directory: as a plain module, as ONNX, as a directory of its own, from another directory."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from exssnet.errors import InputError, StoreError

if TYPE_CHECKING:
    from exssnet.store.model import StoredModel

FORMATS = ("torch", "onnx", "model")
TOLERANCE = 1e-4  # between PyTorch and onnxruntime, relative to the largest output


class Exported(nn.Module):
    """A task's network with its scaling in front: raw inputs in, logits out."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, scaling: Mapping[str, Any] | None, inputs: int) -> None:
        super().__init__()
        self.network = network
        found: dict[str, Any] = {"scale": 1.0, "mean": [0.0], "std": [1.0]} | dict(scaling or {})
        shape = (-1, *[1] * (inputs - 1))  # per channel of an image, per column of a table
        self.scale = float(found["scale"])
        self.register_buffer("mean", torch.tensor(found["mean"]).view(shape))
        self.register_buffer("std", torch.tensor(found["std"]).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x if x.dtype == torch.int64 else (x.float() * self.scale - self.mean) / self.std
        out: Tensor = self.network(scaled)
        return out


def export(model: StoredModel, task: str, path: Path, form: str) -> nn.Module:
    """Write one task on its own; the module that computes it from raw inputs."""
    if form not in FORMATS:
        raise InputError(f"format is '{form}': choose one of {', '.join(FORMATS)}")
    if path.exists():
        raise InputError(f"{path} is there already: choose another name, or remove it")
    beside = path.with_name(f"{path.name}.json")  # what a state_dict does not say
    if form == "torch" and beside.exists():
        raise InputError(f"{beside} is there already: choose another name, or remove it")
    card = model.card(task)
    network = _whole(model.bake(task)).cpu()
    module = Exported(network, card["scaling"] or _unit(card), len(card["recipe"]["shape"])).eval()
    if form == "model":
        _as_directory(model, task, path)
        return module
    content = _state(network) if form == "torch" else _as_onnx(module, card["recipe"], _facts(model, task))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if form == "torch":
            beside.write_text(json.dumps(_facts(model, task), indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error
    return module


def load_exported(path: str | Path) -> Exported:
    """The module of a task that was exported as `torch`, from raw inputs to logits; of a built-in network."""
    from exssnet.models import build

    path = Path(path)
    try:
        told = json.loads(path.with_name(f"{path.name}.json").read_text("utf-8"))
        state = load(path.read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if told["network"] is None:
        raise InputError(f"{path} is of a network of your own: put the state_dict into it yourself")
    network = build(told["network"], told["input"], len(told["labels"]), told["width"])
    network.load_state_dict(state)
    return Exported(network, told["scaling"], len(told["input"])).eval()


def _state(network: nn.Module) -> bytes:
    """The state_dict; tied tensors are in it under each of their names."""
    return save({name: tensor.clone().contiguous() for name, tensor in network.state_dict().items()})


def _facts(model: StoredModel, task: str) -> dict[str, Any]:
    """What somebody needs to know to use an exported task."""
    found, base = model.task(task), model.base
    return {
        "task": task, "labels": list(found.labels), "accuracy": found.accuracy, "network": base.network,
        "width": base.width, "input": list(found.card["recipe"]["shape"]), "recipe": found.card["recipe"],
        "scaling": found.card["scaling"] or _unit(found.card), "digest": found.digest,
    }  # fmt: skip


def _unit(card: Mapping[str, Any]) -> dict[str, Any]:
    """How examples in memory are scaled: not at all, but for images in bytes."""
    return {"scale": 1 / 255} if card["recipe"].get("dtype") == "uint8" else {}


def _whole(module: nn.Module) -> nn.Module:
    """With zeros for the counters that a baked module leaves without storage: nothing reads them."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                part._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return module


def _as_onnx(module: Exported, recipe: Mapping[str, Any], told: Mapping[str, Any]) -> bytes:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'exssnet[onnx]'") from error
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")  # the exporter warns of its own
        program = torch.onnx.export(
            module, (_inputs(2, recipe, module.scale),), dynamo=True, verbose=False, input_names=["input"],
            output_names=["logits"], dynamic_shapes=({0: batch},),
        )  # fmt: skip
    assert program is not None
    found = program.model_proto
    for key, value in told.items():
        found.metadata_props.append(onnx.StringStringEntryProto(key=key, value=json.dumps(value, ensure_ascii=False)))
    content: bytes = found.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    asked = _inputs(3, recipe, module.scale)
    with torch.no_grad():
        wanted = module(asked)
    (answer,) = session.run(["logits"], {"input": asked.numpy()})
    away = float((torch.from_numpy(answer) - wanted).abs().max())
    if not away <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise StoreError(f"onnxruntime does not compute what PyTorch computes (they are {away:g} apart): not written")
    return content


def _inputs(rows: int, recipe: Mapping[str, Any], scale: float) -> Tensor:
    """Raw inputs by chance; of indices, of which the largest is not known, zeros and ones."""
    draw = torch.Generator().manual_seed(rows)
    shape = (rows, *recipe["shape"])
    if recipe.get("dtype") == "int64":
        return torch.randint(0, 2, shape, generator=draw)
    return torch.rand(shape, generator=draw) / scale


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the log of a library, which tells what it has not installed."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _as_directory(model: StoredModel, task: str, path: Path) -> None:
    """The same base, with this task alone."""
    from exssnet.store.model import StoredModel

    alone = StoredModel.with_base(path, model)
    adopt(alone, model, task, task)


def adopt(model: StoredModel, other: StoredModel, task: str, name: str) -> None:
    """Add a task of another directory with the same base."""
    if (model.base.first, model.base.structure) != (other.base.first, other.base.structure):
        raise InputError(f"{other.path} has another base than {model.path}: its tasks cannot be shared")
    found = other.answering(task).network
    card = other.card(task)
    lender = card["task"]["lender"]
    if lender not in [one.name for one in model.tasks] or model.task(lender).digest != other.task(lender).digest:
        card = card | {"task": card["task"] | {"lender": None}}  # not here, or another one of that name
    mask = found.mask(task)
    masked = torch.cat([tensor.reshape(-1) for tensor in found.effective(task).values()])
    private = {key: tensor.clone() for key, tensor in found.task(task).private.items()}
    model.adopt(card, name, mask, masked, private)
