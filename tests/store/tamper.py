"""The files of a model directory, who needs each, and a manifest with bad intentions."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exssnet.store.format.card import identity
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


def rewrite_card(path: Path, task: str, edit: Edit, sign: bool = True) -> None:
    """Another card of a task, in a file with the right digest and, to `sign` it, with the right one in the card."""
    entry = next(each for each in json.loads((path / "manifest.json").read_text())["tasks"] if each["name"] == task)
    found = json.loads((path / "files" / entry["card"]["name"]).read_text())
    edit(found)
    found |= {"digest": identity(found)} if sign else {}
    content = (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{digest[:32]}.json"
    (path / "files" / name).write_bytes(content)

    def put(manifest: dict[str, Any]) -> None:
        for each in manifest["tasks"]:
            if each["name"] == task:
                each["card"] = {"name": name, "sha256": digest, "size": len(content)}

    rewrite(path, put)
