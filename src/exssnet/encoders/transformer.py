"""Encoders of the `transformers` library: the states of the last layer, or the embedding table alone.

Only files on this machine are read, only safetensors, and no code that a folder may bring along.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from exssnet.encoders.base import MOST_TOKENS, Encoded, Encoder, Text, TokenStates, as_states, digest_of
from exssnet.errors import DataError, InputError

WEIGHTS = "*.safetensors"
VOCABULARY = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
TOKENIZER = (*VOCABULARY, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
AT_ONCE = 4096  # tokens that go through the encoder together, on a CPU
AT_ONCE_GPU = 65536
RULES = 1  # raise when the same files would give other states


def transformers() -> Any:
    """The library (untyped), refused where the extra is not installed."""
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        raise InputError("this encoder needs the packages transformers and tokenizers: pip install 'exssnet[text]'")
    return import_module("transformers")


class _FromFolder(Encoder):
    """A folder with config.json, weights and a tokenizer."""

    kind: str

    def __init__(self, folder: Path, name: str | None = None, limit: int = MOST_TOKENS, device: str = "cpu") -> None:
        self.folder, self.name, self.device = folder, name or str(folder), device
        config = _config(folder)
        self.width = _width(folder, config)
        self.limit = min(limit, *_positions(folder, config))

    @property
    def digest(self) -> str:
        return digest_of("transformers", RULES, self.kind, self._files, self.limit)

    @cached_property
    def _files(self) -> str:
        """SHA-256 over the config, the weights and the tokenizer."""
        total = hashlib.sha256()
        for pattern in ("config.json", WEIGHTS, *TOKENIZER):
            for file in sorted(self.folder.glob(pattern)):
                with file.open("rb") as stream:
                    total.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer (untyped)."""
        library = transformers()
        if not any(any(self.folder.glob(pattern)) for pattern in VOCABULARY):  # the library would make an empty one
            raise DataError(
                f"{self.folder}: has no tokenizer; give a folder that has one of {', '.join(VOCABULARY)} too"
            )
        with _reading(self.folder, "tokenizer"):
            return library.AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    @cached_property
    def model(self) -> nn.Module:
        """The transformer without a head, in evaluation mode, its weights frozen."""
        library = transformers()
        logging = library.utils.logging
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # of weights that are loaded in a blink
        try:
            with _reading(self.folder, "model"):
                found: nn.Module = library.AutoModel.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                    dtype=torch.float32,
                )  # fmt: skip
        finally:
            if shown:
                logging.enable_progress_bar()
        return found.requires_grad_(False).eval().to(self.device)

    def tokenize(self, texts: Sequence[Text]) -> tuple[list[dict[str, list[int]]], int]:
        """Input ids of each text, with token types where the encoder has them, and how many texts were cut."""
        tokenize = self.tokenizer
        firsts = [text if isinstance(text, str) else text[0] for text in texts]
        seconds = None if not texts or isinstance(texts[0], str) else [text[1] for text in texts]
        made = tokenize(firsts, seconds, truncation=True, max_length=self.limit, return_attention_mask=False)
        rows = [{name: made[name][row] for name in made} for row in range(len(texts))]
        full = [row for row, one in enumerate(rows) if len(one["input_ids"]) >= self.limit]
        if not full:
            return rows, 0
        long = tokenize(
            [firsts[row] for row in full], None if seconds is None else [seconds[row] for row in full], verbose=False
        )
        return rows, sum(len(ids) > self.limit for ids in long["input_ids"])


class TransformerEncoder(_FromFolder):
    """The states of a layer, the last unless told otherwise, special tokens among them."""

    def __init__(
        self, folder: Path, name: str | None = None, limit: int = MOST_TOKENS, device: str = "cpu",
        layer: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, name, limit, device)
        self.layer, self.kind = layer, f"layer {'last' if layer is None else layer}"

    @torch.no_grad()
    def encode(self, texts: Sequence[Text]) -> Encoded:
        rows, cut = self.tokenize(texts)
        lengths = [len(row["input_ids"]) for row in rows]
        states = [np.zeros((0, self.width), np.float16)] * len(rows)
        most = AT_ONCE_GPU if self.device.startswith("cuda") else AT_ONCE
        waiting: list[int] = []
        for at in sorted(range(len(rows)), key=lengths.__getitem__):  # texts of like lengths together
            if waiting and (len(waiting) + 1) * lengths[at] > most:
                self._forward(rows, waiting, states)
                waiting = []
            if lengths[at]:
                waiting.append(at)
        if waiting:
            self._forward(rows, waiting, states)
        return Encoded(states, cut)

    def _forward(self, rows: list[dict[str, list[int]]], chosen: list[int], states: list[TokenStates]) -> None:
        """Run the encoder on some texts, padded to the longest of them, and put their states in place."""
        lengths = [len(rows[at]["input_ids"]) for at in chosen]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        given = {"attention_mask": mask.long().to(self.device)}
        padding = getattr(self.tokenizer, "pad_token_id", None) or 0  # a causal model may have none: it is not read
        for name in rows[chosen[0]]:
            ids = torch.full(mask.shape, padding if name == "input_ids" else 0)
            for row, at in enumerate(chosen):
                ids[row, : lengths[row]] = torch.tensor(rows[at][name])
            given[name] = ids.to(self.device)
        output = self.model(**given, output_hidden_states=self.layer is not None)
        hidden = output.last_hidden_state if self.layer is None else output.hidden_states[self.layer]
        found = hidden.float().cpu().numpy()
        for row, at in enumerate(chosen):
            states[at] = as_states(found[row, : lengths[row]])


class StaticEncoder(_FromFolder):
    """The rows of a transformer's embedding table, without the transformer: every token by itself."""

    kind = "embedding table"

    def __init__(self, folder: Path, name: str | None = None, limit: int = MOST_TOKENS, device: str = "cpu") -> None:
        super().__init__(folder, name or f"static:{folder}", limit, device)
        config = _config(folder)
        self.width = config.get("embedding_size") or self.width  # ALBERT and ELECTRA have narrower tables

    def encode(self, texts: Sequence[Text]) -> Encoded:
        rows, cut = self.tokenize(texts)
        return Encoded([as_states(self._table[row["input_ids"]]) for row in rows], cut)

    @cached_property
    def _table(self) -> Any:
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        return embedding.weight.detach().float().cpu().numpy()


@contextmanager
def _reading(folder: Path, what: str) -> Iterator[None]:
    """Turn what the library raises over a damaged folder into one line."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(
            f"{folder}: its {what} cannot be loaded ({type(error).__name__}: {why}); give a folder that "
            f"`save_pretrained` of transformers has written, with safetensors"
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder; give one with config.json, model.safetensors and a tokenizer")
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{folder}: has no config.json ({error.strerror}); give the folder of a transformers model"
        ) from error
    except ValueError as error:
        raise DataError(f"{file}: is not JSON; give the folder of a transformers model") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise DataError(f"{file}: names no model_type; give the folder of a transformers model")
    if found.get("is_encoder_decoder"):
        raise DataError(f"{file}: is a model of two parts, {found['model_type']}; give an encoder such as BERT")
    if not any(folder.glob(WEIGHTS)):
        raise DataError(f"{folder}: has no {WEIGHTS}; save the model with safetensors, which cannot run code")
    return found


def _width(folder: Path, config: dict[str, Any]) -> int:
    for name in ("hidden_size", "n_embd", "d_model", "dim"):
        if isinstance(config.get(name), int):
            return int(config[name])
    raise DataError(f"{folder / 'config.json'}: says no hidden_size; this kind of model is not an encoder of texts")


def _positions(folder: Path, config: dict[str, Any]) -> list[int]:
    """How many tokens the encoder has positions for, as far as its files say."""
    found = [config[name] for name in ("max_position_embeddings", "n_positions", "n_ctx") if config.get(name)]
    if config["model_type"] in ("mpnet", "roberta", "xlm-roberta", "camembert", "longformer"):
        found = [most - 2 for most in found]  # their positions are counted from behind the padding's
    try:
        told = json.loads((folder / "tokenizer_config.json").read_bytes()).get("model_max_length")
    except (OSError, ValueError, AttributeError):
        told = None
    usable = [int(most) for most in (*found, told) if isinstance(most, int | float) and 0 < most < 10**9]
    return usable or [MOST_TOKENS]
