"""Nothing that is written in a model directory is trusted."""

import ast
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from tests.store.second_process import change, examples, state, whole
from tests.store.tamper import Edit, all_files, rewrite

import exssnet
from exssnet.errors import ExssnetError, StoreError
from exssnet.store.directory import Folder
from exssnet.store.verify import verify


def assert_refused(path: Path, why: str) -> None:
    before = {each: each.read_bytes() for each in all_files(path)}
    refusals = {"learn new 9": why, "remove a": why, "rollback": why, "create": "is already a model directory"}
    for what, refusal in refusals.items():
        with pytest.raises(StoreError, match=refusal) as error:
            change(path, what)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 1500
    assert [problem.file for problem in verify(Folder(path)).problems] == ["manifest.json"]
    assert {each: each.read_bytes() for each in all_files(path)} == before


def test_a_newer_format_is_refused_and_left_alone(removed):
    rewrite(removed, lambda found: found.update(format=2, exssnet="9.9"))
    assert_refused(removed, r"manifest.json has format 2, from exssnet 9.9; this version reads 1: upgrade")


SHA = "0123456789abcdef" * 4
OUTSIDE = [
    {"name": "../../secret.json", "sha256": SHA, "size": 1},
    {"name": "/etc/passwd", "sha256": SHA, "size": 1},
    {"name": f"../{SHA[:32]}.json", "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.json/../../x.json", "sha256": SHA, "size": 1},
    {"name": f"{SHA[1:33]}.json", "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.pickle", "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.json\0", "sha256": SHA, "size": 1},
    {"name": "../" * 10 + "xx.json", "sha256": "../" * 10 + "xx" + SHA[:32], "size": 1},
    {"name": f"{SHA[:32]}.json", "sha256": SHA[:32], "size": 1},
    {"name": f"{SHA[:32]}.json", "sha256": SHA, "size": float("inf")},
    {"name": ["x"], "sha256": SHA, "size": 1},
    {"name": f"{SHA[:32]}.json", "sha256": SHA},
    "manifest.json",
    0,
]


@pytest.mark.parametrize("file", OUTSIDE, ids=range(len(OUTSIDE)))
def test_a_file_name_that_leads_elsewhere_is_refused(removed, file):
    content = (removed / "manifest.json").read_bytes()
    edits: list[Edit] = [
        lambda found: found["tasks"][0].update(card=file),
        lambda found: found["tasks"][1].update(tensors=file),
        lambda found: found.update(before=file),
        lambda found: found.update(base_file=file),
    ]
    for edit in edits:
        rewrite(removed, edit)
        assert_refused(removed, "is not a manifest of format 1")
        (removed / "manifest.json").write_bytes(content)


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: found.update(base=[]),
        lambda found: found.update(tasks=3),
        lambda found: found.update(tasks=""),
        lambda found: found["tasks"][0].update(name="x" * 10**5),
        lambda found: found.update(change=["x" * 10**5]),
        lambda found: found.update(tasks=[found["tasks"][0]] * 2),
        lambda found: found["tasks"][0].update(name=None),
        lambda found: found["tasks"][0].update(predictor=1),
        lambda found: found.update(number="1"),
        lambda found: found.update(change={}),
        lambda found: found.pop("before"),
        lambda found: found.update(format=True),
        lambda found: found.update(format="1"),
        lambda found: found.update(format=0),
    ],
)
def test_a_manifest_with_values_of_another_kind_is_refused(removed, edit):
    rewrite(removed, edit)
    assert_refused(removed, "is not a manifest of format 1")


NONSENSE = [b"", b"\xff", b"{}", b"[]", b"1", b"[" * 100_000, b'{"format": 1, "x": "\\ud800"}']


@pytest.mark.parametrize("content", NONSENSE, ids=range(len(NONSENSE)))
def test_what_is_no_manifest_is_told_in_a_line(removed, content):
    (removed / "manifest.json").write_bytes(content)
    assert_refused(removed, "manifest.json is damaged")


def test_nothing_is_ever_unpickled(path):
    package = Path(exssnet.__file__).parent
    for source in package.rglob("*.py"):
        tree = ast.parse(source.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules, calls = {name.split(".")[0] for name in names}, set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                safe = any(word.arg == "allow_pickle" and ast.unparse(word.value) == "False" for word in node.keywords)
                calls |= set() if safe else {ast.unparse(node.func)}
        # what processes that it has started itself say, and what numba has compiled, in the user's own cache folder
        if source.name not in ("pixels.py", "jit_numba.py", "jit.py"):
            assert not modules & {"pickle", "dill", "joblib", "marshal"}, source
        assert not calls & {"torch.load", "eval", "exec", "__import__", "np.load", "numpy.load"}, source
        if source.relative_to(package).parts[0] == "store":
            assert "importlib" not in modules, source
            assert "compile" not in calls, source
    for file in all_files(path):
        read = {".json": json.loads, ".safetensors": load}[file.suffix]
        read(file.read_bytes())


def test_files_of_others_do_not_matter_and_stay(removed):
    names = ("README", ".hidden", ".x.tmp", ".manifest.json.1.tmp", f".{'0' * 32}.json.1.tmp", f"{'0' * 32}.json")
    others = [removed / name for name in names]
    others += [removed / "files" / name for name in ("notes.txt", "x.json", ".x.tmp", f"{'0' * 31}.json", "0.next")]
    then = state(removed)
    for other in others:
        other.write_text("mine")
    (removed / "files" / "folder").mkdir()
    assert whole(removed) == then
    change(removed, "learn b 2")
    change(removed, "rollback")
    assert whole(removed) == then
    assert all(other.read_text() == "mine" for other in others)


@pytest.mark.parametrize("network", ["transformer-9000", "trap:make", "os:getcwd", None])
def test_a_directory_that_names_another_network_opens_and_imports_nothing(removed, monkeypatch, tmp_path, network):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    rewrite(removed, lambda found: found["base"].update(network=network))
    before = set(sys.modules)
    model = exssnet.Model.open(removed)
    assert [task.name for task in model.tasks] == ["a", "c"]
    assert model.summary()["base"]["network"] == network
    with pytest.raises(ExssnetError) as error:
        model.predict(examples(0)[0], "a")
    assert "\n" not in str(error.value)
    assert "pass the module" in str(error.value) if network is None else network in str(error.value)
    assert verify(Folder(removed)).verified == (network is None)  # whose files alone are checked
    assert set(sys.modules) == before


@pytest.mark.parametrize("wrong", ["card", "tensors"])
def test_a_whole_file_that_holds_no_task_is_a_problem_of_that_file_and_those_before_answer(removed, wrong):
    """Not damaged on the disk, but written by something else."""
    entry = Folder(removed).manifest().tasks[1]
    old = removed / "files" / (entry.card if wrong == "card" else entry.tensors).name
    content = b"{}\n" if wrong == "card" else save({"mask": torch.zeros(3, dtype=torch.uint8)})
    digest = hashlib.sha256(content).hexdigest()
    name = digest[:32] + old.suffix
    (removed / "files" / name).write_bytes(content)
    rewrite(removed, lambda found: found["tasks"][1][wrong].update(name=name, sha256=digest, size=len(content)))
    (problem,) = verify(Folder(removed)).problems
    assert (problem.file, problem.tasks) == (name, ("c",))
    model = exssnet.Model.open(removed)
    assert len(model.predict(examples(0)[0], "a")) > 0
    with pytest.raises(StoreError, match="task 'c' cannot be read"):
        model.predict(examples(0)[0], "c")
    assert model.remove("c") is None
    assert [task.name for task in model.tasks] == ["a"]
