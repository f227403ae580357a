"""Tasks in and out of a directory: as a plain module, as ONNX, as a directory of its own, from another directory."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
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
        out: Tensor = self.network((x.float() * self.scale - self.mean) / self.std)
        return out


def export(model: StoredModel, task: str, path: Path, form: str) -> nn.Module:
    """Write one task on its own; the module that computes it from raw inputs."""
    if form not in FORMATS:
        raise InputError(f"format is '{form}': choose one of {', '.join(FORMATS)}")
    if path.exists():
        raise InputError(f"{path} is there already: choose another name, or remove it")
    card = model.task(task).card
    module = Exported(_whole(model.bake(task)), card["scaling"] or _unit(card), len(card["recipe"]["shape"])).eval()
    if form == "model":
        _as_directory(model, task, path)
        return module
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "torch":
        save_file({name: tensor.contiguous() for name, tensor in module.network.state_dict().items()}, path)
        path.with_suffix(".json").write_text(json.dumps(_told(model, task), indent=1, ensure_ascii=False) + "\n")
    else:
        _as_onnx(module, tuple(card["recipe"]["shape"]), path, _told(model, task))
    return module


def _told(model: StoredModel, task: str) -> dict[str, Any]:
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


def _as_onnx(module: Exported, shape: tuple[int, ...], path: Path, told: Mapping[str, Any]) -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'exssnet[onnx]'") from error
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own
        program = torch.onnx.export(
            module, (x,), dynamo=True, verbose=False, input_names=["input"], output_names=["logits"],
            dynamic_shapes=({0: batch},),
        )  # fmt: skip
    assert program is not None
    found = program.model_proto
    for key, value in told.items():
        found.metadata_props.append(onnx.StringStringEntryProto(key=key, value=json.dumps(value, ensure_ascii=False)))
    content = found.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    asked = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = module(asked)
    (answer,) = session.run(["logits"], {"input": asked.numpy()})
    away = float((torch.from_numpy(answer) - wanted).abs().max())
    if not away <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise StoreError(f"onnxruntime does not compute what PyTorch computes (they are {away:g} apart): not written")
    path.write_bytes(content)


def _as_directory(model: StoredModel, task: str, path: Path) -> None:
    """The same base, with this task alone."""
    from exssnet.store.model import StoredModel

    alone = StoredModel.with_base(path, model)
    adopt(alone, model, task, task)


def adopt(model: StoredModel, other: StoredModel, task: str, name: str) -> None:
    """Add a task of another directory with the same base."""
    if (model.base.first, model.base.structure) != (other.base.first, other.base.structure):
        raise InputError(f"{other.path} has another base than {model.path}: its tasks cannot be shared")
    found = other.model.network
    card = other.task(task).card
    mask = found.mask(task)
    masked = torch.cat([tensor.reshape(-1) for tensor in found.effective(task).values()])
    private = {key: tensor.clone() for key, tensor in found.task(task).private.items()}
    model.adopt(dict(card), name, mask, masked, private)
