"""The files of a model directory, who needs each, and a manifest with bad intentions."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exssnet.store.verify import ROLLBACK

KINDS = ("removed", "undone", "own network")
Edit = Callable[[dict[str, Any]], object]


def own_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))


def all_files(path: Path) -> list[Path]:
    return [path / "manifest.json", *sorted((path / "files").iterdir())]


def hit(path: Path) -> dict[str, tuple[str, ...]]:
    """The tasks that need each file, from the JSON alone."""
    now = json.loads((path / "manifest.json").read_text())
    names = tuple(task["name"] for task in now["tasks"])
    found = {each.name: (ROLLBACK,) for each in (path / "files").iterdir()} | {"manifest.json": ("all tasks",)}
    if now["base_file"]:
        found[now["base_file"]["name"]] = names
    for place, task in enumerate(now["tasks"]):
        found |= {task[kind]["name"]: names[place:] for kind in ("card", "tensors")}
    return found


def rewrite(path: Path, edit: Edit) -> None:
    """Another manifest, with the right digest of itself: what somebody with bad intentions could write."""
    found = json.loads((path / "manifest.json").read_text())
    del found["sha256"]
    edit(found)
    digest = hashlib.sha256((json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()).hexdigest()
    text = json.dumps(found | {"sha256": digest}, indent=1, ensure_ascii=False) + "\n"
    (path / "manifest.json").write_text(text, encoding="utf-8")
