"""Convert plain values to typed ones by the annotations of dataclasses; `exssnet.io.parse` reads the files.

Numbers are strict: true is not 1 and 1.0 is not a whole number, but a whole number may stand for a float. Names that a
dataclass does not have are ignored, so that a later version may add some; with `strict` they are refused, for files
written by hand, where a misspelt name would go unnoticed.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from exssnet.errors import ExssnetError, ParseError

T = TypeVar("T")


@dataclass(frozen=True)
class Between:
    """For `Annotated`: a number in a range, ends included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}"

    def __call__(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)


@dataclass(frozen=True)
class Matching:
    """For `Annotated`: text that fully matches a pattern; `words` describe it in messages."""

    pattern: str
    words: str

    def __str__(self) -> str:
        return f"that is {self.words}"

    def __call__(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Length:
    """For `Annotated`: text, a list or an object with a length in a range."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"of length {self.low} to {self.high}"

    def __call__(self, value: Any) -> bool:
        return self.low <= len(value) <= self.high


def typed(value: Any, kind: type[T], where: str, *, strict: bool = False) -> T:
    """Convert a plain value to its annotated type; `where` names the file in an error."""
    wanted: Any = kind
    try:
        found: T = _reader(wanted, strict).read(value)
    except _Wrong as wrong:
        raise ParseError(f"{where}{wrong}") from None
    return found


class _Wrong(Exception):
    """A value of the wrong type; its path is added as it propagates."""

    def __init__(self, what: str) -> None:
        self.what, self.path = what, ""

    def within(self, step: str) -> _Wrong:
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        path = self.path.removeprefix(".")
        return f": {path} {self.what}" if path else f" {self.what}"


def _unexpected(value: Any, words: str) -> _Wrong:
    return _Wrong(f"is {short(value)}: {words} was expected")


@dataclass(frozen=True)
class _Reader:
    """Reads a value of an annotation, and describes it in words."""

    read: Callable[[Any], Any]
    words: str


@cache
def _reader(kind: Any, strict: bool) -> _Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin is Annotated:
        return _annotated(_reader(arguments[0], strict), arguments[1:])
    if origin in (Union, UnionType):
        return _union([_reader(one, strict) for one in arguments])
    if origin is Literal:
        words = f"one of {', '.join(map(repr, arguments))}" if len(arguments) > 1 else repr(arguments[0])
        return _checked(lambda value: any(type(value) is type(one) and value == one for one in arguments), words)
    if origin in (list, Sequence):
        return _list(_reader(arguments[0], strict), list)
    if origin is tuple and arguments[1:] == (...,):
        return _list(_reader(arguments[0], strict), tuple)
    if origin is tuple:
        return _tuple([_reader(one, strict) for one in arguments])
    if origin in (dict, Mapping) and arguments[0] is str:
        return _object(_reader(arguments[1], strict))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, strict)
    raise TypeError(f"{kind!r} is not a supported annotation")


def _checked(fits: Callable[[Any], bool], words: str, convert: Callable[[Any], Any] = lambda value: value) -> _Reader:
    def read(value: Any) -> Any:
        if not fits(value):
            raise _unexpected(value, words)
        return convert(value)

    return _Reader(read, words)


_SCALARS: dict[Any, _Reader] = {
    Any: _checked(lambda value: True, "anything"),
    str: _checked(lambda value: type(value) is str, "text"),
    int: _checked(lambda value: type(value) is int, "a whole number"),
    float: _checked(lambda value: type(value) in (int, float), "a number", float),
    bool: _checked(lambda value: type(value) is bool, "true or false"),
    NoneType: _checked(lambda value: value is None, "null"),
}
_LIST = _checked(lambda value: type(value) is list, "a list")
_OBJECT = _checked(lambda value: type(value) is dict and all(type(name) is str for name in value), "an object")


def _annotated(inner: _Reader, marks: Sequence[Any]) -> _Reader:
    words = " ".join([inner.words, *map(str, marks)])

    def read(value: Any) -> Any:
        try:
            found = inner.read(value)
        except _Wrong as wrong:
            raise wrong if wrong.path else _unexpected(value, words) from None
        if not all(mark(found) for mark in marks):
            raise _unexpected(value, words)
        return found

    return _Reader(read, words)


def _union(members: list[_Reader]) -> _Reader:
    words = " or ".join(member.words for member in members)

    def read(value: Any) -> Any:
        inner = None
        for member in members:
            try:
                return member.read(value)
            except _Wrong as wrong:
                inner = wrong if wrong.path else inner  # the type was right, a value inside is not
        raise inner or _unexpected(value, words)

    return _Reader(read, words)


def _list(member: _Reader, made: Callable[[list[Any]], Any]) -> _Reader:
    def read(value: Any) -> Any:
        found = []
        for index, one in enumerate(_LIST.read(value)):
            try:
                found.append(member.read(one))
            except _Wrong as wrong:
                raise wrong.within(f"[{index}]") from None
        return made(found)

    return _Reader(read, _LIST.words)


def _tuple(members: list[_Reader]) -> _Reader:
    words = f"a list of {len(members)}"
    exact = _checked(lambda value: type(value) is list and len(value) == len(members), words)

    def read(value: Any) -> Any:
        found = []
        for index, (member, one) in enumerate(zip(members, exact.read(value), strict=True)):
            try:
                found.append(member.read(one))
            except _Wrong as wrong:
                raise wrong.within(f"[{index}]") from None
        return tuple(found)

    return _Reader(read, words)


def _object(member: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        return {name: _entry(name, one, member) for name, one in _OBJECT.read(value).items()}

    return _Reader(read, _OBJECT.words)


def _dataclass(kind: Any, strict: bool) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    known = {field.name: _reader(hints[field.name], strict) for field in fields}
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]

    def read(value: Any) -> Any:
        _OBJECT.read(value)
        for name in needed:
            if name not in value:
                raise _Wrong("is missing").within(f".{name}")
        for name in value if strict else ():
            if name not in known:
                raise _Wrong(f"is unknown: remove it, or use one of {', '.join(known)}").within(_step(name))
        found = {name: _entry(name, value[name], member) for name, member in known.items() if name in value}
        try:
            return kind(**found)
        except (ValueError, TypeError, ExssnetError) as error:  # from the dataclass's checks
            raise _Wrong(f"is refused: {line(error)}") from error

    return _Reader(read, _OBJECT.words)


def _entry(name: str, value: Any, member: _Reader) -> Any:
    try:
        return member.read(value)
    except _Wrong as wrong:
        raise wrong.within(_step(name)) from None


def _step(name: str) -> str:
    return f".{name}" if re.fullmatch(r"\w{1,40}", name) else f"[{short(name)}]"


# --- words ------------------------------------------------------------------------

_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel, _SHORTENED.maxstring, _SHORTENED.maxother = 2, 60, 60
_SHORTENED.maxdict = _SHORTENED.maxlist = 3


def short(value: Any) -> str:
    """Shorten a value for an error message."""
    return _SHORTENED.repr(value)


def line(error: BaseException) -> str:
    """The message of an error, in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
