"""Plain values become values of the kind that an annotation says, or one line that says which field is wrong."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.io.test_parse import PLAIN, refusal, refused_in_a_line_if_at_all

from exssnet.errors import ParseError
from exssnet.io import parse
from exssnet.io.parse import (
    Between,
    Length,
    Matching,
    from_yaml,
    json_file,
    typed,
    yaml_file,
)


@dataclass(frozen=True)
class Inner:
    digest: Annotated[str, Matching("[0-9a-f]{4}", "4 hexadecimal digits")]
    size: Annotated[int, Between(0, 10)] = 3


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Length(1, 5)]
    share: float
    kind: Literal["a", "b"]
    on: bool
    inner: Inner | None
    many: tuple[Inner, ...]
    named: dict[str, list[int]]
    pair: tuple[int, str] = (0, "")
    either: int | str | None = None
    rest: Any = None
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.name == "no":
            raise ValueError("name is 'no':\nchoose another")


GOOD: dict[str, Any] = {
    "name": "n", "share": 0.5, "kind": "a", "on": True, "inner": {"digest": "00ff"},
    "many": [{"digest": "abcd", "size": 1}], "named": {"x y": [1, 2]}, "pair": [1, "one"], "either": "text",
    "rest": {"what": ["ever"]}, "made": [7],
}  # fmt: skip


def test_a_value_of_every_kind_is_read_as_its_annotation_says():
    wanted = Outer(
        "n", 0.5, "a", True, Inner("00ff"), (Inner("abcd", 1),), {"x y": [1, 2]}, (1, "one"), "text",
        {"what": ["ever"]}, [7],
    )  # fmt: skip
    assert typed(GOOD, Outer, "it") == wanted
    few = {name: GOOD[name] for name in ("name", "share", "kind", "on", "many", "named")} | {"inner": None}
    found = typed(few, Outer, "it")
    assert (found.inner, found.pair, found.either, found.rest, found.made) == (None, (0, ""), None, None, [])
    share = typed(GOOD | {"share": 1}, Outer, "it").share
    assert (share, type(share)) == (1.0, float)


DIGEST, SIZE = "text that is 4 hexadecimal digits was expected", "a whole number from 0 to 10 was expected"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "it: name is 3: text of length 1 to 5 was expected"),
        ({"name": ""}, "it: name is '': text of length 1 to 5 was expected"),
        ({"name": "no"}, "it is refused: name is 'no': choose another"),
        ({"share": True}, "it: share is True: a number was expected"),
        ({"share": "0.5"}, "it: share is '0.5': a number was expected"),
        ({"kind": "c"}, "it: kind is 'c': one of 'a', 'b' was expected"),
        ({"kind": ["a"]}, "it: kind is ['a']: one of 'a', 'b' was expected"),
        ({"on": 1}, "it: on is 1: true or false was expected"),
        ({"on": None}, "it: on is None: true or false was expected"),
        ({"inner": 5}, "it: inner is 5: an object or null was expected"),
        ({"inner": {}}, "it: inner.digest is missing"),
        ({"inner": {"digest": "00fg"}}, "it: inner.digest is '00fg': " + DIGEST),
        ({"inner": {"digest": "00ff\n"}}, "it: inner.digest is '00ff\\n': " + DIGEST),
        ({"inner": {"digest": "00ff", "size": 1.0}}, "it: inner.size is 1.0: " + SIZE),
        ({"inner": {"digest": "00ff", "size": 11}}, "it: inner.size is 11: " + SIZE),
        ({"inner": {"digest": "00ff", "size": True}}, "it: inner.size is True: " + SIZE),
        ({"many": {}}, "it: many is {}: a list was expected"),
        ({"many": "abcd"}, "it: many is 'abcd': a list was expected"),
        ({"many": [{"digest": "abcd"}, 7]}, "it: many[1] is 7: an object was expected"),
        ({"many": [{"digest": "abcd"}] * 2 + [{"digest": 1}]}, "it: many[2].digest is 1: " + DIGEST),
        ({"named": {"x y": [1, "2"]}}, "it: named['x y'][1] is '2': a whole number was expected"),
        ({"named": {3: []}}, "it: named is {3: []}: an object was expected"),
        ({"pair": [1]}, "it: pair is [1]: a list of 2 was expected"),
        ({"pair": ["1", "one"]}, "it: pair[0] is '1': a whole number was expected"),
        ({"either": 1.5}, "it: either is 1.5: a whole number or text or null was expected"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_told_with_its_field_and_what_was_expected(change, message):
    assert refusal(typed, GOOD | change, Outer, "it") == message


def test_the_ends_of_a_range_and_of_a_length_belong_to_it():
    for size in (0, 10):
        assert typed({"digest": "00ff", "size": size}, Inner, "it").size == size
    for name in ("n", "nnnnn"):
        assert typed(GOOD | {"name": name}, Outer, "it").name == name
    assert "of length 1 to 5" in refusal(typed, GOOD | {"name": "nnnnnn"}, Outer, "it")


def test_a_literal_number_is_not_true():
    one: Any = Literal[1]
    assert typed(1, one, "it") == 1
    assert refusal(typed, True, one, "it") == "it is True: 1 was expected"


def test_a_missing_field_is_told_and_one_that_is_not_known_only_where_people_write():
    for name in ("name", "inner", "named"):
        assert refusal(typed, {k: v for k, v in GOOD.items() if k != name}, Outer, "it") == f"it: {name} is missing"
    later = GOOD | {"later": 1, "inner": {"digest": "00ff", "later": 2}}
    assert typed(later, Outer, "it") == typed(GOOD, Outer, "it")
    assert refusal(typed, GOOD | {"later": 1}, Outer, "it", strict=True).startswith(
        "it: later is unknown: remove it, or use one of name, share, kind"
    )
    text = refusal(typed, GOOD | {"inner": {"digest": "00ff", "later": 2}}, Outer, "it", strict=True)
    assert text == "it: inner.later is unknown: remove it, or use one of digest, size"


def test_a_value_in_a_message_is_short_however_large_it_is():
    for value in ("x" * 10**6, [[[[0] * 1000] * 1000]], {str(i): "y" * 1000 for i in range(10**4)}):
        refusal(typed, GOOD | {"share": value}, Outer, "it")
        refusal(typed, {"x" * 10**6: 1}, dict[str, str], "it")
    refusal(from_yaml, b"a: !" + b"x" * 10**5 + b" 1", "it")


@given(PLAIN)
def test_any_plain_value_is_read_or_refused_in_a_line(value):
    for kind in (Outer, Inner, int, str | None, list[float], dict[str, Inner], tuple[int, ...], Literal["a", 1]):
        for strict in (False, True):
            refused_in_a_line_if_at_all(typed, value, kind, "it", strict=strict)


@given(st.sampled_from(sorted(GOOD)), PLAIN)
def test_what_is_read_is_of_the_kind_that_was_asked_for(name, value):
    try:
        found = typed(GOOD | {name: value}, Outer, "it")
    except ParseError:
        return
    assert 1 <= len(found.name) <= 5
    assert type(found.share) is float
    assert math.isfinite(found.share)
    assert found.kind in ("a", "b")
    assert type(found.on) is bool
    assert found.inner is None or (type(found.inner) is Inner and 0 <= found.inner.size <= 10)
    assert all(type(one) is Inner for one in found.many)
    assert all(type(number) is int for numbers in found.named.values() for number in numbers)
    assert [type(one) for one in found.pair] == [int, str]
    assert type(found.either) in (int, str, type(None))
    assert all(type(one) is int for one in found.made)


def test_files_are_read_as_typed_values_and_errors_name_them(tmp_path):
    (tmp_path / "a.json").write_text('{"digest": "00ff", "later": 1}')
    assert json_file(tmp_path / "a.json", Inner) == Inner("00ff")
    (tmp_path / "a.json").write_text('{"digest": "00f"}')
    assert refusal(json_file, tmp_path / "a.json", Inner).startswith(f"{tmp_path / 'a.json'}: digest is '00f': ")
    (tmp_path / "a.yaml").write_text("digest: 00ff\nsize: 2")
    assert yaml_file(tmp_path / "a.yaml", Inner) == Inner("00ff", 2)
    (tmp_path / "a.yaml").write_text("digest: 00ff\nsizes: 2")
    assert refusal(yaml_file, tmp_path / "a.yaml", Inner).startswith(f"{tmp_path / 'a.yaml'}: sizes is unknown")
    (tmp_path / "a.yaml").write_text("x" * (parse.YAML.size + 1))
    assert "at most 262,144 were expected" in refusal(yaml_file, tmp_path / "a.yaml", Inner)


def test_an_annotation_that_cannot_be_read_is_the_programmers_error():
    with pytest.raises(TypeError, match="is not a supported annotation"):
        typed({}, set[int], "it")
