import subprocess
import sys
from math import log2

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from exssnet.errors import DataError, InputError
from exssnet.store.format import codec_reference
from exssnet.store.format.codec import decode, encode

weights = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=300)
seeds = st.integers(0, 2**31)
PLAIN = "010020f9e212f26742bc9e8f5fb8a810b8270e64242fc34ffcdbf2"  # 32 ones of 400


def bools(size, density, seed):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density


def vectors(drawn):
    return [torch.tensor(vector) for vector in zip(*drawn, strict=True)]


def entropy(size, density):
    return size * (density * log2(1 / density) + (1 - density) * log2(1 / (1 - density)))


def predicted_by(lender, overlap, seed):
    """A mask as large as the lender's, with this part of it."""
    kept = lender & bools(len(lender), overlap, seed)
    density = float((lender.sum() - kept.sum()) / (~lender).sum())
    return kept | (~lender & bools(len(lender), density, seed + 1))


# --- the format as the module describes it, in plain Python ----------------------------------------------------


def as_described(mask, kind, used, lender):
    """Per group its total and its mask, in the order of the format."""
    key = [(kind & 1) * int(u) + (kind & 2) * int(v) for u, v in zip(used, lender, strict=True)]
    groups = [[int(m) for m, k in zip(mask, key, strict=True) if k == n] for n in range(4) if n | kind == kind]
    data = bytes([1, kind])
    moved_up, low, r = 0, 0, 2**64 - 1
    for group in groups:
        ones = sum(group)
        while ones >= 128:
            data, ones = data + bytes([ones % 128 + 128]), ones // 128
        data += bytes([ones])
    for group in groups:
        if not 0 < sum(group) < len(group):
            continue
        p = sum(group) / len(group)
        z = int((1 - p) * ((2**24 - 2) / ((1 - p) + p))) + 1
        for bit in group:
            s = r >> 24
            low, r = (low + s * z, s * (2**24 - z)) if bit else (low, s * z)
            if r < 2**32:
                low, r, moved_up = low << 32, r << 32, moved_up + 1
    if r == 2**64 - 1:
        return data
    code = (low + 2**32 - 1) >> 32
    return data + b"".join((code >> 32 * place & 0xFFFFFFFF).to_bytes(4, "little") for place in range(moved_up, -1, -1))


@given(weights)
def test_the_bytes_are_those_the_format_describes(drawn):
    mask, used, lender = vectors(drawn)
    data = encode(mask, used, lender)
    assert data == as_described(mask, data[1], used, lender)


@given(weights)
def test_the_reference_reads_what_is_written_with_every_context(drawn):
    mask, used, lender = vectors(drawn)
    for known in ({}, {"used": used}, {"lender": lender}, {"used": used, "lender": lender}):
        lists = {name: vector.tolist() for name, vector in known.items()}
        assert codec_reference.decode(encode(mask, **known), len(mask), **lists) == mask.tolist()
    for kind in range(4):  # also those that `encode` would not choose
        data = as_described(mask, kind, used, lender)
        assert codec_reference.decode(data, len(mask), used.tolist(), lender.tolist()) == mask.tolist()
        assert torch.equal(decode(data, len(mask), used, lender), mask)


@given(st.integers(1, 3000), st.floats(0, 1), seeds)
def test_the_reference_reads_long_masks(size, density, seed):
    mask = bools(size, density, seed)
    data = encode(mask)
    assert data == as_described(mask, 0, mask, mask)
    assert codec_reference.decode(data, size) == mask.tolist()


@pytest.mark.parametrize(("ones", "total"), [(13, 47), (45, 47), (26, 94)])
def test_the_reference_rounds_probabilities_as_doubles_do(ones, total):
    assert int((1 - ones / total) * (2**24 - 2)) != (total - ones) * (2**24 - 2) // total
    mask = torch.zeros(40 * total, dtype=torch.bool)
    mask[torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))[: 40 * ones]] = True
    assert codec_reference.decode(encode(mask), len(mask)) == mask.tolist()


def test_the_reference_needs_nothing_but_python():
    program = f"""
import runpy
decode = runpy.run_path({codec_reference.__file__!r})["decode"]
assert sum(decode(bytes.fromhex("{PLAIN}"), 400)) == 32
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)  # without installed packages


def test_the_format_has_not_changed():
    place = torch.arange(1000)
    lender, used = place % 7 == 0, place % 3 > 0
    new = ~used & (place % 31 == 5)
    half, whole = lender & (place % 2 == 0) | ~lender & new, lender | new
    lent = "010209482d3564b999594b98f79b1b52a0f4e4b7ebd359580030756a8b8b907c"
    both = "01030900305f1271acb6d6abdb23"
    assert encode(half[:400]).hex() == PLAIN
    assert encode(half, lender=lender).hex() == lent
    assert encode(whole, used, lender).hex() == both
    assert torch.equal(decode(bytes.fromhex(PLAIN), 400), half[:400])
    assert torch.equal(decode(bytes.fromhex(lent), 1000, lender=lender), half)
    assert torch.equal(decode(bytes.fromhex(both), 1000, used, lender), whole)


# --- round trips and sizes -------------------------------------------------------------------------------------


@given(weights)
def test_any_mask_comes_back_with_any_used_set_and_lender(drawn):
    mask, used, lender = vectors(drawn)
    for known in ({}, {"used": used}, {"lender": lender}, {"used": used, "lender": lender}):
        data = encode(mask, **known)
        again = decode(data, len(mask), **known)
        assert again.dtype == torch.bool
        assert torch.equal(again, mask)
        assert len(data) <= len(encode(mask))


@given(st.integers(1, 60_000), st.floats(0, 1), st.floats(0, 1), seeds)
def test_a_context_never_costs_a_byte(size, density, overlap, seed):
    lender = bools(size, density, seed)
    used = lender | bools(size, 0.3, seed + 2)
    mask = predicted_by(lender, overlap, seed + 3) if 0 < lender.sum() < size else lender
    plain = len(encode(mask))
    for known in ({"used": used}, {"lender": lender}, {"used": used, "lender": lender}):
        data = encode(mask, **known)
        assert len(data) <= plain
        assert torch.equal(decode(data, size, **known), mask)


@pytest.mark.parametrize("size", [0, 1, 2, 8, 127, 128, 20_000])
@pytest.mark.parametrize("value", [True, False])
def test_a_mask_of_one_value_is_its_header(size, value):
    mask = torch.full((size,), value)
    data = encode(mask)
    assert len(data) <= 5
    assert torch.equal(decode(data, size), mask)


def test_groups_may_be_empty():
    mask, none, every = bools(500, 0.3, 0), torch.zeros(500, dtype=torch.bool), torch.ones(500, dtype=torch.bool)
    for used in (none, every, mask, ~mask):
        for lender in (none, every, mask, ~mask):
            assert torch.equal(decode(encode(mask, used, lender), 500, used, lender), mask)
    assert len(encode(mask, lender=mask)) <= 6  # all that is left to say is how many


@pytest.mark.parametrize("density", [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("size", [20_000, 266_200])
def test_a_mask_takes_its_entropy(density, size):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.randperm(size, generator=torch.Generator().manual_seed(7))[: round(density * size)]] = True
    assert len(encode(mask)) <= 1.03 * entropy(size, density) / 8 + 12
    assert len(encode(mask)) <= 1.004 * entropy(size, density) / 8 + 12


def test_a_mask_that_the_lender_predicts_is_smaller():
    lender = bools(100_000, 0.1, 1)
    used = lender | bools(100_000, 0.2, 2)
    mask = predicted_by(lender, 0.6, 3)
    alone = entropy(100_000, 0.1)
    told = entropy(10_000, 0.6) + entropy(90_000, 4 / 90)
    assert len(encode(mask)) == pytest.approx(alone / 8, rel=0.02)
    assert len(encode(mask, used, lender)) == pytest.approx(told / 8, rel=0.02)
    assert len(encode(mask, used)) < 0.95 * len(encode(mask))


def test_the_used_set_and_the_lender_tell_more_than_either():
    lender, used = bools(50_000, 0.1, 1), bools(50_000, 0.5, 2)
    mask = (lender & bools(50_000, 0.6, 3)) | (~used & bools(50_000, 0.1, 4))
    both = encode(mask, used, lender)
    assert both[1] == 3
    assert len(both) < 0.97 * min(len(encode(mask, used)), len(encode(mask, lender=lender)))


def test_a_mask_that_nothing_predicts_needs_nothing_to_be_read():
    mask = bools(50_000, 0.1, 1)
    data = encode(mask, bools(50_000, 0.5, 2), bools(50_000, 0.1, 3))
    assert torch.equal(decode(data, 50_000), mask)


def test_another_process_writes_the_same_bytes():
    mask, lender = bools(30_000, 0.1, 1), bools(30_000, 0.1, 1) | bools(30_000, 0.05, 2)
    again = encode(mask.clone(), lender=lender.clone())
    program = """
import torch
from exssnet.store.format.codec import encode
drawn = [torch.rand(30_000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
print(encode(drawn[0] < 0.1, lender=(drawn[0] < 0.1) | (drawn[1] < 0.05)).hex())
"""
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == again.hex() == encode(mask, lender=lender).hex()


# --- damage ----------------------------------------------------------------------------------------------------


def refused(data, size, **known):
    with pytest.raises(DataError, match=r"^a stored mask [^\n]*$"):
        decode(data, size, **known)


@pytest.mark.parametrize("missing", ["used", "lender"])
def test_a_context_that_is_needed_and_missing_is_named(missing):
    mask, other = bools(1000, 0.3, 0), {"used": "lender", "lender": "used"}[missing]
    data = encode(mask, **{missing: mask})
    for known in ({}, {other: mask}):
        with pytest.raises(DataError, match=f"needs the {missing}.*which is missing"):
            decode(data, 1000, **known)


def test_another_version_is_named():
    data = encode(bools(100, 0.3, 0))
    with pytest.raises(DataError, match="has version 2, this version of exssnet reads 1"):
        decode(b"\x02" + data[1:], 100)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it has 0 bytes"),
        (b"\x01", "it has 1 bytes"),
        (b"\x01\x04\x03", "context kind is 4"),
        (b"\x01\x00", "ends within a count"),
        (b"\x01\x00\x80", "ends within a count"),
        (b"\x01\x00" + b"\xff" * 100_000 + b"\x01", "ends within a count"),
        (b"\x01\x00\x65", "counts 101 ones among 100 weights"),
        (b"\x01\x00\x80\x00", "the count 0 in 2 bytes"),
        (b"\x01\x00\x00\x00\x00\x00\x00", "4 bytes follow"),
        (b"\x01\x00\x09\x00\x00\x00", "3 bytes follow"),
        (b"\x01\x00\x09\x00\x00\x00\x00", "0 ones where it counts 9"),
        (b"\x01\x00\x09" + b"\xff" * 8, "not a code"),
    ],
)
def test_damage_is_named(data, what):
    with pytest.raises(DataError, match=what):
        decode(data, 100)


@given(st.integers(1, 2000), st.sampled_from([0.01, 0.1, 0.5]), seeds, st.data())
def test_a_mask_cut_short_or_continued_is_refused(size, density, seed, data):
    known = {"lender": bools(size, 0.5, seed + 1)}
    stored = encode(bools(size, density, seed) & known["lender"], **known)
    refused(stored[: data.draw(st.integers(0, len(stored) - 1))], size, **known)
    refused(stored + data.draw(st.binary(min_size=1, max_size=12)), size, **known)
    refused(stored + bytes(4), size, **known)


@given(weights, st.binary(max_size=40), st.integers(0, 3))
def test_whatever_is_read_is_what_would_be_written(drawn, noise, kind):
    mask, used, lender = vectors(drawn)
    data = bytes([1, kind]) + noise
    try:
        found = decode(data, len(mask), used, lender)
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert data == as_described(found, kind, used, lender)


@given(st.integers(20, 5000), seeds, st.data())
def test_a_flipped_byte_is_refused_or_gives_another_mask_as_dense(size, seed, data):
    mask = bools(size, 0.2, seed)
    stored = bytearray(encode(mask))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(stored), size)
    except DataError:
        return
    assert encode(found) == stored
    assert not torch.equal(found, mask)


@given(st.integers(50, 500), seeds)
def test_another_lender_never_gives_a_mask_that_contradicts_the_header(size, seed):
    mask = bools(size, 0.3, seed)
    lender, other = mask ^ bools(size, 0.02, seed + 1), bools(size, 0.3, seed + 2)
    data = encode(mask, lender=lender)
    assume(data[1])
    try:
        found = decode(data, size, lender=other)
    except DataError:
        return
    assert data == as_described(found, 2, other, other)


def test_arguments_of_another_kind_or_size_are_refused():
    mask = bools(10, 0.5, 0)
    for wrong in (torch.ones(10), torch.ones((2, 5), dtype=torch.bool), torch.tensor(True)):
        with pytest.raises(InputError, match="the mask must be"):
            encode(wrong)
    with pytest.raises(InputError, match="the used set must be 10 bools"):
        encode(mask, used=mask[:9])
    with pytest.raises(InputError, match="the lender's mask must be 9 bools"):
        decode(encode(mask), 9, lender=mask)
