"""Files from outside become typed values, or one line that says what is wrong: never a traceback, a hang or a guess."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exssnet.errors import ParseError
from exssnet.io.parse import (
    Limits,
    from_json,
    from_yaml,
    json_file,
    read,
    read_safetensors,
)

READERS = {"json": from_json, "yaml": from_yaml}


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    with pytest.raises(ParseError) as error:
        call(*arguments, **named)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def refused_in_a_line_if_at_all(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with suppress(ParseError):
        call(*arguments, **named)
        return
    assert refusal(call, *arguments, **named).startswith("it")


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_regular_file_is_read_as_it_is_up_to_its_limit(tmp_path):
    for content in (b"", b"x" * 99, b"x" * 100):
        (tmp_path / "file").write_bytes(content)
        assert read(tmp_path / "file", 100) == content
    (tmp_path / "file").write_bytes(b"x" * 101)
    assert refusal(read, tmp_path / "file", 100) == f"{tmp_path / 'file'} has 101 bytes: at most 100 were expected"


def test_a_sparse_file_of_a_terabyte_is_refused_unread(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2**40)
    assert "has 1,099,511,627,776 bytes" in refusal(read, tmp_path / "file", 10**9)


def test_what_is_not_a_regular_file_is_refused_without_being_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is limited to about 100 characters
    os.mkfifo("FIFO")
    os.mkdir("folder")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        Path("device").symlink_to("/dev/zero")

        def opened(*_: Any, **__: Any) -> int:
            raise AssertionError("opened")

        monkeypatch.setattr(os, "open", opened)
        for kind in ("FIFO", "folder", "socket", "device"):
            assert refusal(read, Path(kind), 100) == f"{kind} is a {kind}: a regular file was expected"


@pytest.mark.parametrize("kind", ["FIFO", "link"])
def test_a_file_that_is_exchanged_while_it_is_opened_is_refused(tmp_path, monkeypatch, kind):
    """Between the look at the file and its opening."""
    path, real = tmp_path / "file", os.open
    path.write_bytes(b"x")

    def exchanged(*arguments: Any) -> int:
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        else:
            path.symlink_to("/etc/hostname")
        return real(*arguments)

    monkeypatch.setattr(os, "open", exchanged)
    with pytest.raises((ParseError, OSError), match=r"is a FIFO|Too many levels of symbolic links"):
        read(path, 100)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, real = tmp_path / "file", os.fstat
    path.write_bytes(b"x")

    def grown(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        path.write_bytes(b"x" * 50)
        return status

    monkeypatch.setattr(os, "fstat", grown)
    assert "grew while it was read" in refusal(read, path, 100)


def test_links_are_followed_but_not_out_of_the_folder_that_a_file_should_be_in(tmp_path):
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder in (model / "files", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    (tmp_path / "beside the model").symlink_to(model)
    (model / "within").symlink_to("files/file")
    (model / "out").symlink_to("../elsewhere/file")
    (model / "folder out").symlink_to("../elsewhere")
    for path in (model, tmp_path / "beside the model"):
        assert read(path / "within", 9, inside=path) == b"x"
        assert read(path / "out", 9) == b"x"
        for out in ("out", "folder out/file", "files/../../elsewhere/file"):
            assert "is a link out of" in refusal(read, path / out, 9, inside=path)
    (tmp_path / "model2").mkdir()
    (tmp_path / "model2" / "file").write_bytes(b"x")
    (model / "out").unlink()
    (model / "out").symlink_to("../model2/file")  # whose name begins alike
    assert "is a link out of" in refusal(read, model / "out", 9, inside=model)


def test_a_safetensors_file_is_refused_unread_where_its_size_is_not_that_of_its_header(tmp_path):
    path = tmp_path / "file"
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(8)
    for content in (whole, (2).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        assert read_safetensors(path, 999) == content
    for content in (whole[:-1], whole + b"\0", b"", whole[:8], whole[:7], bytes(999), b"\xff" * 99):
        path.write_bytes(content)
        refusal(read_safetensors, path, 999)
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert "its header cannot have" in refusal(read_safetensors, path, 2**50)
    path.write_bytes(whole)
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert f"not the {len(whole)} of its header" in refusal(read_safetensors, path, 2**50)
    bad = header.replace(b"[0,8]", b"[0,-8]")
    path.write_bytes(len(bad).to_bytes(8, "little") + bad + bytes(8))
    assert f"the header of {path}: a.data_offsets[1] is -8" in refusal(read_safetensors, path, 999)


def test_a_missing_or_unreadable_file_keeps_the_error_of_the_system(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for name, error in (("missing", FileNotFoundError), ("loop", OSError)):
        with pytest.raises(error):
            read(tmp_path / name, 9)
        assert "cannot be read: " in refusal(json_file, tmp_path / name, int)


# --- JSON and YAML -------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=9)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_whatever_a_program_writes_is_read_back(value):
    assert from_json(json.dumps(value).encode(), "it") == value
    assert from_json(json.dumps(value, ensure_ascii=False, indent=1).encode(), "it") == value
    assert from_yaml(yaml.safe_dump(value, allow_unicode=True).encode(), "it") == value


@given(st.binary(max_size=60) | st.text("[]{}:,-&*!?|>%@`'\"#<\\ \n\tabn01.e_~", max_size=40).map(str.encode))
def test_any_bytes_give_a_value_or_a_refusal(content):
    for reader in READERS.values():
        refused_in_a_line_if_at_all(reader, content, "it")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "the name 'c' occurs twice"),
        ('{"a": 1, "\\u0061": 2}', "the name 'a' occurs twice"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[1e999]", "has inf: a finite number was expected"),
        (f"[{2**64}]", "a number of 64 bits was expected"),
        (f"[{-(2**63) - 1}]", "a number of 64 bits was expected"),
        ("1" * 5000, "is not JSON"),
        ('["\\ud800"]', "a lone surrogate is not a character"),
        ('{"\\udfff": 1}', "a lone surrogate is not a character"),
        ("[" * 100_000, "is nested deeper than 40 levels"),
        ("[" * 41 + "]" * 41, "is nested deeper than 40 levels"),
        ('{"a":' * 41 + "1" + "}" * 41, "is nested deeper than 40 levels"),
        ("[1, 2", "is not JSON"),
        ("", "is not JSON"),
        ("\ufeff[]", "is not JSON"),
        ("'a'", "is not JSON"),
    ],
)
def test_json_that_no_program_should_write_is_refused(content, why):
    assert why in refusal(from_json, content.encode(), "it")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", "a name occurs twice in line 3"),
        ("a: &x 1\nb: *x", "aliases (*) are not supported"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "aliases (*) are not supported"),
        ("a: .nan", "a finite number was expected"),
        ("a: -.inf", "a finite number was expected"),
        (f"a: 0x{'f' * 17}", "a number of 64 bits was expected"),
        ("a: " + "1" * 5000, "is not YAML"),
        ("a: 2020-01-01", "a number, text, list or object was expected"),
        ("a: !!binary aGk=", "a number, text, list or object was expected"),
        ("a: !!set {b, c}", "a number, text, list or object was expected"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("a: !!int ''", "is not YAML"),
        ("a: !!bool perhaps", "is not YAML"),
        ("a: !!timestamp x", "is not YAML"),
        ("{[1]: 2}", "is not YAML"),
        ("[" * 10_000, "is nested deeper than 40 levels"),
        ("[" * 41 + "]" * 41, "is nested deeper than 40 levels"),
        ("a: b: c", "is not YAML"),
        ("a: \x00", "is not YAML"),
        ("--- 1\n--- 2", "is not YAML"),
    ],
)
def test_yaml_that_no_person_should_write_is_refused(content, why):
    assert why in refusal(from_yaml, content.encode(), "it")


def test_aliases_that_stand_for_a_billion_values_are_refused():
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    assert "aliases (*) are not supported" in refusal(from_yaml, bomb.encode(), "it")


@pytest.mark.parametrize("kind", READERS)
def test_size_depth_and_number_of_values_are_limited_exactly(kind):
    reader = READERS[kind]
    assert reader(b"[1,2]", "it", Limits(size=5)) == [1, 2]
    assert "has 5 bytes: at most 4" in refusal(reader, b"[1,2]", "it", Limits(size=4))
    assert reader(b"[[1,2]]", "it", Limits(depth=2)) == [[1, 2]]
    assert "deeper than 1 levels" in refusal(reader, b"[[1,2]]", "it", Limits(depth=1))
    assert reader(b'{"a": [1, {"b": 2}]}', "it", Limits(values=7)) == {"a": [1, {"b": 2}]}
    assert "has more than 6 values" in refusal(reader, b'{"a": [1, {"b": 2}]}', "it", Limits(values=6))
    assert "is not UTF-8 text" in refusal(reader, b"\xff\xfe", "it")


def test_json_with_too_many_values_is_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("made"))
    for content in (b"[" * 99, b"[" + b"[]," * 99 + b"1]", b"{" * 99):
        assert "has more than 98 values" in refusal(from_json, content, "it", Limits(values=98))
