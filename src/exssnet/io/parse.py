"""Read untrusted files strictly and with limits, as typed values.

    @dataclass(frozen=True)
    class Entry:
        name: str
        size: Annotated[int, Between(0, 2**40)]

    entry = parse.json_file(path, Entry)    # or a ParseError of one line: file, field, value, what was expected

Only regular files are opened, and their size is known before they are read. No name may occur twice, no number may
be NaN, infinite or of more than 64 bits, text is whole Unicode characters, YAML has no aliases, and depth and number of
values are limited. `exssnet.io.typed` explains the annotations.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from exssnet.errors import ParseError
from exssnet.io.disk import flag
from exssnet.io.typed import Between, Length, Matching, line, short, typed

__all__ = [
    "JSON", "MEBIBYTE", "YAML", "Between", "Length", "Limits", "Matching", "ParseError", "from_json", "from_yaml",
    "header_of", "json_file", "opened", "read", "read_safetensors", "typed", "yaml_file",
]  # fmt: skip

T = TypeVar("T")
MEBIBYTE = 2**20
LEAST, MOST = -(2**63), 2**64  # of whole numbers, the latter excluded
MOST_HEADER = 100 * 10**6  # bytes of a safetensors header: the format's own limit


@dataclass(frozen=True)
class Limits:
    """Limits of a file: size in bytes, number of values, depth of nesting."""

    size: int = 16 * MEBIBYTE
    values: int = 10**6
    depth: int = 40


JSON = Limits()
YAML = Limits(size=MEBIBYTE // 4)  # its parser takes seconds for a mebibyte


# --- files -------------------------------------------------------------------------------------------------


def read(path: Path, most: int, inside: Path | None = None) -> bytes:
    """Read a regular file of at most `most` bytes. OSError if it cannot be opened or read.

    A FIFO or a device is refused before it is opened, a file that is too large before it is read. Links are followed;
    with `inside` only to files in that folder.
    """
    with opened(path, most, inside) as (file, size):
        return _rest(path, file, size)


def read_safetensors(path: Path, most: int, inside: Path | None = None) -> bytes:
    """Read a safetensors file; one whose size does not match its header is refused unread."""
    with opened(path, most, inside) as (file, size):
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER, size - 8):
            raise ParseError(f"{path} is not a safetensors file: its header cannot have {length:,} bytes")
        tensors = header_of(file.read(length), f"the header of {path}")
        data = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        if 8 + length + data != size:
            raise ParseError(f"{path} has {size:,} bytes, not the {8 + length + data:,} of its header")
        file.seek(0)
        return _rest(path, file, size)


@dataclass(frozen=True)
class TensorHeader:
    """Description of a tensor in a safetensors header."""

    dtype: str
    shape: tuple[Annotated[int, Between(0, 2**48)], ...]
    data_offsets: tuple[Annotated[int, Between(0, 2**48)], Annotated[int, Between(0, 2**48)]]


def header_of(content: bytes, where: str) -> dict[str, TensorHeader]:
    """Parse the tensors of a safetensors header, by name."""
    found = from_json(content, where, Limits(size=MOST_HEADER))
    if isinstance(found, dict):
        found.pop("__metadata__", None)
    kind: type[dict[str, TensorHeader]] = dict[str, TensorHeader]
    return typed(found, kind, where)


@contextmanager
def opened(path: Path, most: int, inside: Path | None) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; yield it and its size."""
    target = Path(os.path.realpath(path))
    if inside is not None and not target.is_relative_to(os.path.realpath(inside)):
        raise ParseError(f"{path} is a link out of {inside}: replace it by the file")
    _require_regular(path, os.stat(target))
    flags = os.O_RDONLY | flag("O_NOFOLLOW") | flag("O_NONBLOCK") | flag("O_CLOEXEC") | flag("O_BINARY")
    with os.fdopen(os.open(target, flags), "rb") as file:
        status = os.fstat(file.fileno())
        _require_regular(path, status)  # again: the path may name another file by now
        if status.st_size > most:
            raise ParseError(f"{path} has {status.st_size:,} bytes: at most {most:,} were expected")
        yield file, status.st_size


def require_regular(path: Path) -> None:
    """Refuse FIFOs and devices, for files that a library opens by path."""
    _require_regular(path, os.stat(path))


def _rest(path: Path, file: BinaryIO, size: int) -> bytes:
    content = file.read(size + 1)
    if len(content) > size:
        raise ParseError(f"{path} grew while it was read: try again when it is complete")
    return content


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "device")
        raise ParseError(f"{path} is a {kind}: a regular file was expected")


# --- text to plain values ----------------------------------------------------------------------------------


def from_json(content: bytes, where: str, limits: Limits = JSON) -> Any:
    """Parse JSON to plain values; `where` names the file in an error."""
    text = _text(content, where, limits)
    if sum(map(text.count, ",[{")) > limits.values:  # before parsing; commas in strings count too
        raise ParseError(f"{where} has more than {limits.values:,} values")
    try:
        found = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_not_finite)
    except RecursionError as error:
        raise ParseError(f"{where} is nested deeper than {limits.depth} levels") from error
    except ValueError as error:
        raise ParseError(f"{where} is not JSON: {line(error)}") from error
    _require_plain(found, where, limits)
    return found


def from_yaml(content: bytes, where: str, limits: Limits = YAML) -> Any:
    """Parse YAML to plain values; `where` names the file in an error."""
    import yaml

    text = _text(content, where, limits)
    try:
        found = yaml.load(text, _yaml_loader())
    except RecursionError as error:
        raise ParseError(f"{where} is nested deeper than {limits.depth} levels") from error
    except Exception as error:  # a tag such as !!int before text raises any exception
        raise ParseError(f"{where} is not YAML: {line(error)}") from error
    _require_plain(found, where, limits)
    return found


def _text(content: bytes, where: str, limits: Limits) -> str:
    if len(content) > limits.size:
        raise ParseError(f"{where} has {len(content):,} bytes: at most {limits.size:,} were expected")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ParseError(f"{where} is not UTF-8 text: {line(error)}") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {short(twice)} occurs twice")
    return found


def _not_finite(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


@cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader without aliases, a few of which can expand to a billion values, and duplicate names."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*) are not supported: write the value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise yaml.YAMLError(f"a name occurs twice in line {node.start_mark.line + 1} or below")
            return found

    return Loader


def _require_plain(value: Any, where: str, limits: Limits) -> None:
    """Refuse deep nesting, numbers out of range and lone surrogates anywhere in a value."""
    level, depth, left = [value], 0, limits.values
    while level:
        left -= len(level)
        if left < 0:
            raise ParseError(f"{where} has more than {limits.values:,} values")
        below: list[Any] = []
        for one in level:
            kind = type(one)
            if (kind is int and LEAST <= one < MOST) or (kind is str and one.isascii()):
                continue  # most values
            if isinstance(one, dict | list):
                if depth == limits.depth:
                    raise ParseError(f"{where} is nested deeper than {depth} levels")
                below += one
                if isinstance(one, dict):
                    below += one.values()
            elif wrong := _wrong_scalar(one):
                raise ParseError(f"{where} has {short(one)}: {wrong}")
        level, depth = below, depth + 1


def _wrong_scalar(value: Any) -> str:
    if isinstance(value, str):
        return "" if value.isascii() or _is_unicode(value) else "a lone surrogate is not a character"
    if isinstance(value, float):
        return "" if math.isfinite(value) else "a finite number was expected"
    if isinstance(value, int):
        return "" if LEAST <= value < MOST else "a number of 64 bits was expected"
    return "" if value is None else "a number, text, list or object was expected"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_file(path: Path, kind: type[T], limits: Limits = JSON, *, inside: Path | None = None) -> T:
    """Read a JSON file as a typed value."""
    return typed(from_json(_content(path, limits, inside), str(path), limits), kind, str(path))


def yaml_file(path: Path, kind: type[T], limits: Limits = YAML, *, inside: Path | None = None) -> T:
    """Read a YAML file as a typed value; unknown names are refused."""
    return typed(from_yaml(_content(path, limits, inside), str(path), limits), kind, str(path), strict=True)


def _content(path: Path, limits: Limits, inside: Path | None) -> bytes:
    try:
        return read(path, limits.size, inside)
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror}") from error
