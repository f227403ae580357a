"""Records in one compressed file: read as run folders are, and refused in one line whatever is in the file."""

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from tests.experiments.comparing import STUDIES, record_of

from exssnet.cli.compare_tables import FORMATS
from exssnet.errors import InputError, RunError
from exssnet.experiments import archive, compare

REAL = record_of("split-mnist", "exssnet")
PACK = STUDIES / "pack.py"


def written(folder: Path, *records, before: bytes = b"", after: bytes = b"") -> Path:
    file = folder / "records.jsonl.gz"
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    file.write_bytes(gzip.compress(before + b"".join(lines) + after))
    return file


def test_packed_runs_give_the_tables_of_their_folders(put, tmp_path, exssnet):
    put("exssnet", [90.0, 92.0, 97.0])
    runs = put("er", [80.0, 82.0], config={"head": "task"})
    for file in runs.rglob("results.json"):
        epochs = [{"event": "epoch", "task": "task1", "phase": "mask", "epoch": n, "epochs": 3, "loss": 0.1,
                   "accuracy": 90.0 + n, "validation": None, "lr": 0.1, "seconds": 1.0} for n in (1, 2, 3)]  # fmt: skip
        lines = map(json.dumps, [*epochs, {"event": "task", "task": "task1", "accuracies": [1.0]}])
        file.with_name("log.jsonl").write_text("\n".join(lines))
    packed = tmp_path / "packed/records.jsonl.gz"
    packed.parent.mkdir()
    done = exssnet(runs / "a", "--out", packed, program=PACK)
    assert (done.returncode, done.stderr) == (0, "")
    expected = compare.compare(compare.read([runs / "a"]))
    for path in (packed, packed.parent):
        found = compare.compare(compare.read([path]))
        assert all(write(found) == write(expected) for write in FORMATS.values())
    for line in gzip.decompress(packed.read_bytes()).splitlines():
        (last,) = json.loads(line)["last_epochs"]
        assert (last["epochs"], last["accuracy"]) == (3, 93.0)


def test_folders_and_archives_are_read_together_and_the_same_run_twice_is_refused(put, tmp_path):
    folder = put("er", [80.0, 82.0])
    written(tmp_path / "a", REAL)
    assert [row.method for row in compare.compare(compare.read([folder]))] == ["exssnet", "er"]
    put("exssnet", [REAL["average_accuracy"]], place="b")
    with pytest.raises(InputError, match=r"b/split-mnist.* have the same settings and seed") as raised:
        compare.compare(compare.read([folder]))
    assert "records.jsonl.gz, line 1" in str(raised.value)
    second = written(tmp_path / "b", REAL, REAL)
    with pytest.raises(InputError, match=r"line 1 and .*line 2 have the same settings and seed"):
        compare.compare(compare.read([second]))


HOSTILE = {
    "not JSON": (b"{\n", "line 2 is not JSON"),
    "a list": (b"[1]\n", "line 2 is a list|line 2 is [1]"),
    "an empty line": (b"\n", "line 2 is not JSON"),
    "a name twice": (b'{"seed": 1, "seed": 2}\n', "the name 'seed' occurs twice"),
    "not a number": (json.dumps(REAL | {"average_accuracy": float("nan")}).encode(), "NaN is not a JSON number"),
    "deep": (b"[" * 10**5 + b"]" * 10**5, "nested deeper"),
    "a long line": (b"x" * (16 * 2**20 + 1), "at most 16,777,216 were expected"),
    "a wrong type": (json.dumps(REAL | {"seed": "1"}).encode(), "seed is '1': a whole number was expected"),
    "half a record": (json.dumps(REAL).encode()[:-100], "line 2 is not JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_line_is_refused_with_its_number(tmp_path, case):
    content, said = HOSTILE[case]
    file = written(tmp_path, REAL, after=content)
    with pytest.raises(RunError) as raised:
        compare.read([tmp_path])
    message = str(raised.value)
    assert f"{file}, line 2" in message
    assert any(part in message for part in said.split("|"))
    assert "\n" not in message
    assert len(message) < 1000 + len(str(file))


def test_a_file_that_expands_without_end_is_refused_after_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_EXPANDED", 10**6)
    many = written(tmp_path, *[REAL | {"seed": seed} for seed in range(1000)])
    assert many.stat().st_size < 10**5
    with pytest.raises(RunError, match="expands to more than 1,000,000 bytes"):
        compare.read([tmp_path])


def test_a_line_without_end_is_refused_with_little_memory(tmp_path):
    written(tmp_path, before=b"x" * (100 * 2**20))
    tracemalloc.start()
    with pytest.raises(RunError, match="at most 16,777,216 were expected"):
        compare.read([tmp_path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * 2**20


def test_a_damaged_archive_is_read_as_before_or_refused_in_one_line(tmp_path):
    content = written(tmp_path, *[REAL | {"seed": seed} for seed in range(3)]).read_bytes()
    file, draw = tmp_path / "records.jsonl.gz", random.Random(0)
    damaged = [content[:length] for length in range(0, len(content), 97)] + [content + b"x" * 20, b"PK\3\4"]
    for _ in range(200):
        at = draw.randrange(len(content))
        damaged.append(content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :])
    refused = 0
    for one in damaged:
        file.write_bytes(one)
        try:
            found = [run.accuracy for run in compare.read([file])]
        except RunError as error:
            said, found = str(error), None
        assert (found is None and str(file) in said and "\n" not in said) or found == [REAL["average_accuracy"]] * 3
        refused += found is None
    assert refused > 0.9 * len(damaged)


def a_huge_file(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(2**40)


def test_only_a_regular_file_of_the_folder_is_opened(tmp_path, exssnet):
    outside = written(tmp_path, REAL)
    folder = tmp_path / "study"
    folder.mkdir()
    file = folder / "records.jsonl.gz"
    for make, said in (
        (lambda: file.symlink_to(outside), "is a link out of"),
        (lambda: os.mkfifo(file), "is a FIFO"),
        (lambda: a_huge_file(file), "has 1,099,511,627,776 bytes"),
    ):
        make()
        with pytest.raises(RunError, match=said):
            compare.read([folder])
        file.unlink()
    file.mkdir()
    done = exssnet("compare", folder)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert str(file) in done.stderr


def test_nothing_is_written_next_to_an_archive(tmp_path):
    hostile = REAL | {"benchmark": "../../x", "method": "/etc/passwd", "device": "\x1b[31m"}
    written(tmp_path, hostile)
    shown = [write(compare.compare(compare.read([tmp_path]), "/etc/passwd")) for write in FORMATS.values()]
    assert "\x1b" not in "".join(shown)
    assert [file.name for file in tmp_path.iterdir()] == ["records.jsonl.gz"]
