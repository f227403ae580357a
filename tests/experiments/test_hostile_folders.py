"""Run folders that somebody else has written: whatever is in them, an error of one line names the file."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.experiments.comparing import record_of
from tests.experiments.short_runs import short

from exssnet.cli import run_display as terminal
from exssnet.cli.compare_tables import FORMATS
from exssnet.errors import RunError
from exssnet.experiments import compare
from exssnet.experiments.config import RunConfig
from exssnet.experiments.run import run
from exssnet.experiments.run_folder import RunFolder
from exssnet.io.disk import temporary

REAL = record_of("split-mnist", "exssnet+kkt")
DEEP = "[" * 100_000 + "]" * 100_000
VALUES = [
    "null", "true", "-1", "0", "1.5", "1e999", "NaN", str(10**400), str(2**70), '"x"', '""', '"%s"' % ("x" * 10**6),
    r'"\u001b[31m[bold]\u202e\n"', r'"\ud800"', "[]", "{}", "[[]]", "[null]", '{"a": null}', '{"a": []}', "[1, 2, 3]",
    '[["a"]]', DEEP, '{"digests": {}}', '{"total": "1"}', '{"total": 1, "tasks": {}}',
]  # fmt: skip


def paths(value, path=()):
    """Every position in a record down to three levels; of a list the first entry stands for all."""
    if path:
        yield path
    if len(path) < 3 and isinstance(value, dict):
        for name in value:
            yield from paths(value[name], (*path, name))
    elif len(path) < 3 and isinstance(value, list) and value:
        yield from paths(value[0], (*path, 0))


def changed(path, value):
    """The record as JSON, with this text in place of what stands there."""
    record = copy.deepcopy(REAL)
    inner = record
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = "HERE"
    return json.dumps(record).replace('"HERE"', value)


PATHS = list(paths(REAL))


def read_or_refused(read, file):
    """What is read, or None where it is refused as it should be."""
    try:
        return read()
    except RunError as error:
        said = str(error)
    assert str(file) in said
    assert len(said) < 1000 + len(str(file))
    assert "\n" not in said
    return None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_record_with_any_value_anywhere_is_shown_or_refused_in_one_line(tmp_path, capsys, path):
    file = tmp_path / "results.json"
    for value in VALUES:
        file.write_text(changed(path, value))
        runs = read_or_refused(lambda: compare.read([tmp_path]), file)
        if runs is None:
            continue
        rows = compare.compare(runs, runs[0].method)
        shown = [FORMATS[form](rows) for form in FORMATS]
        terminal.print_record(json.loads(file.read_text()), tmp_path)
        terminal.print_summary([json.loads(file.read_text())] * 2)
        assert "\x1b" not in "".join([*shown, capsys.readouterr().out])


def test_the_record_itself_is_fine_and_its_shape_matters(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(REAL))
    assert compare.read([tmp_path])[0].accuracy == REAL["average_accuracy"]
    for name, value in {
        "accuracy_matrix": [*REAL["accuracy_matrix"][:-1], [None, 1, 1, 1, 1]],
        "class_order": REAL["class_order"][1:],
        "sparse_overlap": [0.5],
        "transfer": [],
        "tasks": 4,
        "accuracy_measured": [[True] * 5] * 5,
        "config": REAL["config"] | {"settings": {"lr": [0.1]}},
    }.items():
        file.write_text(json.dumps(REAL | {name: value}))
        with pytest.raises(RunError, match=r"results\.json is refused: "):
            compare.read([tmp_path])


CONTENT = {
    "not JSON": b"{",
    "a list": b"[1]",
    "not text": b"\xff\xfe",
    "nothing in it": b"{}",
    "nothing": b"",
    "a name twice": b'{"seed": 1, "seed": 2}',
}


@pytest.mark.parametrize("case", CONTENT)
def test_a_damaged_record_is_named_by_compare_and_by_the_run_that_would_read_it(tmp_path, case):
    folder = tmp_path / short().folder
    folder.mkdir(parents=True)
    (folder / "results.json").write_bytes(CONTENT[case])
    for read in (lambda: compare.read([tmp_path]), lambda: run(short(), tmp_path)):
        with pytest.raises(RunError, match=r"results\.json.*delete the file to repeat the run") as raised:
            read()
        assert "\n" not in str(raised.value)
    assert {file.name for file in folder.iterdir()} == {"results.json"}


YAML_VALUES = [value for value in VALUES if len(value) < 10**6] + [
    "[" * 2000 + "]" * 2000, "x" * 10**5, "{a: b}", "!!python/name:os.system", "&a [*a]", "../x",
]  # fmt: skip


@pytest.mark.parametrize("name", [*RunConfig.__dataclass_fields__, "density"])
def test_a_configuration_with_any_value_anywhere_is_read_or_refused_in_one_line(tmp_path, name):
    file = tmp_path / "config.yaml"
    real = yaml.safe_load(short().to_yaml())
    (real if name in real else real["settings"])[name] = "HERE"
    for value in YAML_VALUES:
        file.write_text(yaml.safe_dump(real).replace("HERE", value))
        found = read_or_refused(lambda: RunConfig.read(file), file)
        assert found is None or isinstance(found, RunConfig)


def exssnet(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "exssnet", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def a_link_out(file: Path):
    target = file.parents[4] / f"mine-{file.name}"
    target.write_text(json.dumps(REAL))
    file.symlink_to(target)


def a_huge_file(file: Path):
    with file.open("wb") as stream:
        stream.truncate(2**40)


FILES = ("config.yaml", "results.json", "log.jsonl", "checkpoint.safetensors", "lock")
STRANGE = {
    "link": (a_link_out, "is a link", FILES),
    "FIFO": (os.mkfifo, "is a FIFO", FILES),
    "folder": (Path.mkdir, "is a folder", FILES),
    "huge": (a_huge_file, "has 1,099,511,627,776 bytes", FILES[:2]),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in STRANGE for name in STRANGE[kind][2]])
def test_what_is_not_a_regular_file_of_the_folder_is_neither_read_nor_written(tmp_path, kind, name):
    make, said, _ = STRANGE[kind]
    folder = tmp_path / "runs" / short().folder
    folder.mkdir(parents=True)
    make(folder / name)
    with pytest.raises(RunError, match=f"{name} {said}") as raised:
        run(short(), tmp_path / "runs")
    assert "\n" not in str(raised.value)
    assert [file.name for file in folder.iterdir()] == [name]
    if kind == "link":
        assert (tmp_path / f"mine-{name}").read_text() == json.dumps(REAL)


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder", "huge"])
def test_compare_opens_no_record_that_is_not_a_regular_file_of_the_folder(tmp_path, kind):
    make, _, _ = STRANGE[kind]
    folder = tmp_path / "runs" / short().folder
    folder.mkdir(parents=True)
    make(folder / "results.json")
    done = exssnet("compare", "runs", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"{folder.relative_to(tmp_path)}/results.json" in done.stderr


def test_a_log_that_becomes_a_link_while_the_run_goes_on_is_not_followed(tmp_path):
    folder = RunFolder(tmp_path, short())
    folder.path.mkdir(parents=True)
    folder.log(event="a")
    (tmp_path / "mine").write_text("mine")
    (folder.path / "log.jsonl").unlink()
    (folder.path / "log.jsonl").symlink_to(tmp_path / "mine")
    for write in (lambda: folder.log(event="b"), lambda: folder.cut_log(0)):
        with pytest.raises(RunError, match=r"log\.jsonl is a link"):
            write()
    assert (tmp_path / "mine").read_text() == "mine"


def test_only_our_own_unfinished_files_are_cleared_away(tmp_path):
    folder = RunFolder(tmp_path, short())
    folder.path.mkdir(parents=True)
    for name in (".results.json.123.tmp", ".mine.tmp", ".notes.123.tmp"):
        (folder.path / name).write_text("")
    temporary(folder.path / "checkpoint.safetensors").write_text("")
    with folder.writing():
        left = {file.name for file in folder.path.iterdir()}
    assert left == {".mine.tmp", ".notes.123.tmp", "config.yaml", "lock"}
