"""The cache of token states: each text is encoded once, whoever asks, whatever happens to the files."""

import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from exssnet.encoders import states as module
from exssnet.encoders.base import Encoded
from exssnet.encoders.states import GB, StateCache, state_cache
from exssnet.encoders.words import RandomEncoder
from exssnet.errors import InputError

TEXTS = [f"text number {at} " + "more " * (at % 7) for at in range(20)] + ["", ("a pair", "of texts")]


class Counting(RandomEncoder):
    """Counts the texts that go through it; may be told to die after some."""

    def __init__(self, width=4, seed=0, limit=16, dies_after=None):
        super().__init__(width, seed, limit)
        self.texts, self.dies_after = 0, dies_after

    def encode(self, texts) -> Encoded:
        if self.dies_after is not None and self.texts >= self.dies_after:
            raise KeyboardInterrupt
        self.texts += len(texts)
        return super().encode(texts)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "SHARD", 5)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "states"


def cache_of(folder: Path, most: int = GB) -> StateCache:
    """As another process has it: nothing open yet."""
    return StateCache(folder, most)


def same(found, texts=TEXTS, encoder=None) -> bool:
    wanted = (encoder or RandomEncoder(4, 0, 16)).encode(texts)
    rows = [np.array_equal(found[row], states) for row, states in enumerate(wanted.states)]
    return all(rows) and found.cut == wanted.cut and len(found) == len(texts)


def test_states_are_the_encoders_and_a_second_time_nothing_is_encoded(folder):
    encoder = Counting()
    assert same(cache_of(folder).states(encoder, TEXTS))
    assert encoder.texts == len(TEXTS)
    for cache in (cache_of(folder), cache_of(folder)):
        found = cache.states(encoder, TEXTS)
        assert same(found)
        assert found.encoded == 0
    assert encoder.texts == len(TEXTS)


def test_with_a_warm_cache_no_forward_of_a_transformer_happens_and_no_weights_are_loaded(folder, tmp_path):
    from exssnet import encoders

    from . import tiny

    path = str(tiny.make(tmp_path / "bert"))
    first, forwards = encoders.load(path), []
    first.model.register_forward_hook(lambda *_: forwards.append(1))
    texts = [text for text in TEXTS if isinstance(text, str)]
    cold = cache_of(folder).states(first, texts)
    assert forwards
    second = encoders.load(path)
    warm = cache_of(folder).states(second, texts)
    assert "model" not in vars(second)  # it has not been loaded
    assert all(np.array_equal(cold[row], warm[row]) for row in range(len(texts)))


def test_only_real_tokens_are_stored_in_two_bytes_each(folder):
    encoder = RandomEncoder(64, 0, 16)
    found = cache_of(folder).states(encoder, TEXTS)
    tokens = sum(min(len(found[row]), 16) for row in range(len(TEXTS)))
    stored = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert tokens * 64 * 2 < stored < tokens * 64 * 2 + 5 * 1000


def test_other_weights_limits_and_texts_are_other_entries(folder):
    cache = cache_of(folder)
    cache.states(Counting(), TEXTS)
    for encoder in (Counting(seed=1), Counting(limit=3), Counting(width=8)):
        assert same(cache.states(encoder, TEXTS), encoder=RandomEncoder(encoder.width, encoder.seed, encoder.limit))
        assert encoder.texts == len(TEXTS)
    encoder = Counting()
    assert same(cache.states(encoder, TEXTS[::-1]), TEXTS[::-1])
    assert encoder.texts == len(TEXTS)


def test_a_stopped_encoding_goes_on_where_it_was(folder):
    with pytest.raises(KeyboardInterrupt):
        cache_of(folder).states(Counting(dies_after=10), TEXTS)
    encoder = Counting()
    seen = []
    assert same(cache_of(folder).states(encoder, TEXTS, lambda *at: seen.append(at)))
    assert encoder.texts == len(TEXTS) - 10
    assert seen == [(10, 22), (15, 22), (20, 22), (22, 22)]


def test_a_killed_process_leaves_its_finished_shards(folder):
    code = f"""
        import os
        from pathlib import Path
        from exssnet.encoders import states
        from exssnet.encoders.words import RandomEncoder
        states.SHARD = 5
        class Dying(RandomEncoder):
            done = 0
            def encode(self, texts):
                if self.done == 3:
                    os.kill(os.getpid(), 9)
                self.done += 1
                return super().encode(texts)
        states.StateCache(Path({str(folder)!r}), 10**9).states(Dying(4, 0, 16), {TEXTS!r})
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode != 0
    encoder = Counting()
    assert same(cache_of(folder).states(encoder, TEXTS))
    assert encoder.texts == len(TEXTS) - 15


def test_processes_share_the_work(folder, tmp_path):
    """Every shard is made by exactly one of them."""
    code = f"""
        import sys, time
        from pathlib import Path
        from exssnet.encoders import states
        from exssnet.encoders.words import RandomEncoder
        states.SHARD = 5
        class Slow(RandomEncoder):
            def encode(self, texts):
                time.sleep(0.5)
                return super().encode(texts)
        ready = Path({str(tmp_path)!r})
        (ready / sys.argv[1]).touch()
        while len(list(ready.glob("process-*"))) < 2:
            time.sleep(0.01)
        print(states.StateCache(Path({str(folder)!r}), 10**9).states(Slow(4, 0, 16), {TEXTS!r}).encoded)
    """
    commands = [[sys.executable, "-c", textwrap.dedent(code), f"process-{at}"] for at in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    encoded = [int(process.communicate()[0]) for process in running]
    assert sum(encoded) == len(TEXTS)
    assert all(encoded)
    assert same(cache_of(folder).states(Counting(), TEXTS))


def flip(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-10])


def empty(file):
    file.write_bytes(b"")


def another(file):
    """A whole shard under another's name."""
    other = next(one for one in file.parent.glob("*.safetensors") if one != file)
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, empty, another])
def test_a_damaged_file_is_noticed_and_encoded_again(folder, damage):
    cache_of(folder).states(Counting(), TEXTS)
    damage(sorted(folder.rglob("*.safetensors"))[1])
    encoder = Counting()
    assert same(cache_of(folder).states(encoder, TEXTS))
    assert 0 < encoder.texts <= 5
    again = Counting()
    assert same(cache_of(folder).states(again, TEXTS))
    assert again.texts == 0


def test_what_was_not_used_for_longest_goes_when_the_cache_is_full(folder):
    sizes = []
    for seed in range(3):
        cache_of(folder).states(Counting(seed=seed), TEXTS)
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*.safetensors")))
        for file in folder.rglob("*.safetensors"):  # as if it had been a while ago
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 100))
    cache_of(folder).states(Counting(seed=0), TEXTS)  # the oldest is used again
    cache = cache_of(folder, most=sizes[2])
    cache.states(Counting(seed=3), TEXTS)
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) <= sizes[2]
    left = [Counting(seed=seed) for seed in (0, 3, 1)]
    for encoder in left:
        cache_of(folder).states(encoder, TEXTS)
    assert [encoder.texts for encoder in left] == [0, 0, len(TEXTS)]


def test_a_data_set_larger_than_the_cache_is_kept_whole_and_that_is_said(folder):
    with pytest.warns(UserWarning, match="EXSSNET_CACHE_GB"):
        cache_of(folder, most=100).states(Counting(), TEXTS)
    encoder = Counting()
    assert same(cache_of(folder, most=100).states(encoder, TEXTS))
    assert encoder.texts == 0


def test_without_a_writable_folder_texts_are_encoded_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="EXSSNET_CACHE"):
        found = cache_of(tmp_path / "file").states(Counting(), TEXTS)
    assert same(found)


def test_what_is_kept_is_told_by_encoder_and_can_be_cleared(folder):
    cache = cache_of(folder)
    before = time.time() - 1
    cache.states(Counting(), TEXTS)
    cache.states(Counting(seed=1), TEXTS[:7])
    kept = {one.encoder: one for one in cache.kept()}
    assert {name: one.texts for name, one in kept.items()} == {"random:4:0": len(TEXTS), "random:4:1": 7}
    assert all(one.width == 4 and one.used > before for one in kept.values())
    total = sum(one.size for one in kept.values())
    assert cache.clear() == total > 0
    assert cache.kept() == []
    encoder = Counting()
    assert same(cache.states(encoder, TEXTS))
    assert encoder.texts == len(TEXTS)


def test_no_texts_are_no_states(folder):
    found = cache_of(folder).states(Counting(), [])
    assert len(found) == len(found.lengths) == found.cut == 0


def test_states_in_use_survive_that_the_cache_is_cleared(folder):
    cache = cache_of(folder)
    found = cache.states(Counting(), TEXTS)
    cache.clear()
    assert same(found)


@pytest.mark.parametrize("size", ["x", "-1", "nan"])
def test_a_size_that_is_none_is_refused(monkeypatch, size):
    monkeypatch.setenv("EXSSNET_CACHE_GB", size)
    with pytest.raises(InputError, match=r"EXSSNET_CACHE_GB.*gigabytes"):
        state_cache()


def test_the_usual_cache_lies_below_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path))
    monkeypatch.setenv("EXSSNET_CACHE_GB", "2.5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state_cache().states(Counting(), TEXTS)
    assert list((tmp_path / "states").rglob("*.safetensors"))
    assert state_cache().most_bytes == 2_500_000_000
