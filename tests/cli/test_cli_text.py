"""Text from the command line: encoders, the cache, own streams, and what is wrong in one line."""

import json
import re

from tests.experiments import own_streams

QUICK = ("--encoder", "random:16", "--width", "8", "--batch-size", "16", "--epochs", "2")


def test_encoders_are_listed_with_whether_they_are_here(exssnet):
    done = exssnet("list", "encoders", COLUMNS="200")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["random"].startswith("here: ")
    assert all(line.startswith(("here: ", "not here: ")) for line in lines.values())


def test_a_stream_of_own_texts_is_learned_cached_shown_and_cleared(exssnet, tmp_path):
    file = own_streams.text_stream(tmp_path, count=12)
    cache = tmp_path / "cache"
    done = exssnet("run", "--stream", file, *QUICK, cwd=tmp_path, EXSSNET_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert "encoding task-0 train: " in done.stderr
    assert "texts: 48, of which 0 were cut and 0 are empty" in done.stdout
    assert (tmp_path / "runs" / "mine" / "exssnet" / "seed-0" / "results.json").exists()
    other = ("--seeds", "1", "--encoder", "random:16:0")
    again = exssnet("run", "--stream", file, *QUICK, *other, cwd=tmp_path, EXSSNET_CACHE=str(cache))
    assert again.returncode == 0, again.stderr
    assert "encoding" not in again.stderr
    shown = exssnet("cache", EXSSNET_CACHE=str(cache), EXSSNET_CACHE_GB="3")
    assert re.search(r"random:16:0 +16 +48 ", shown.stdout)
    assert f"of at most 3 (EXSSNET_CACHE_GB) in {cache}" in shown.stdout
    assert "deleted" in exssnet("cache", "clear", EXSSNET_CACHE=str(cache)).stdout
    assert "random" not in exssnet("cache", EXSSNET_CACHE=str(cache)).stdout


def test_json_shows_no_progress_and_has_the_counts(exssnet, tmp_path):
    file = own_streams.text_stream(tmp_path, count=12)
    done = exssnet("run", "--stream", file, *QUICK, "--json", cwd=tmp_path, EXSSNET_CACHE=str(tmp_path / "cache"))
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert sum(split["texts"] for split in record["texts"].values()) == 48


def refused(done, says):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_what_is_wrong_is_one_line_and_nothing_is_written(exssnet, tmp_path):
    file = own_streams.text_stream(tmp_path, count=12)
    where = {"cwd": tmp_path, "EXSSNET_CACHE": str(tmp_path / "cache")}
    refused(exssnet("run", "split-digits", "--stream", file, **where), "give one of them")
    refused(exssnet("run", "--stream", tmp_path / "none.yaml", **where), "none.yaml")
    refused(exssnet("run", "--stream", tmp_path / "task-0.csv", **where), "is not a YAML file")
    refused(exssnet("run", "--stream", file, "--encoder", "no-such", **where), "--encoder random")
    refused(exssnet("run", "--stream", file, "--encoder", tmp_path, **where), "config.json")
    (tmp_path / "task-0.csv").write_bytes(b"\xff\xfe\x00")
    refused(exssnet("run", "--stream", file, *QUICK, **where), "is not UTF-8 text")
    assert not (tmp_path / "runs").exists()
    refused(exssnet("cache", EXSSNET_CACHE_GB="much"), "EXSSNET_CACHE_GB is 'much'")
