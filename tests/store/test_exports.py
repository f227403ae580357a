"""What leaves a directory takes what `predict` takes, says so, and is of use where this package is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parts import need
from tests.store.small import QUICK, Own, X, content, create, learn
from torch import Tensor, nn

from exssnet import InputError, Model, StoreError
from exssnet.core.proof import digests_of
from exssnet.store.format.card import identity
from exssnet.store.stored_model import StoredModel

WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "exssnet":
            raise ImportError("this machine has no exssnet")
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import torch
"""


def elsewhere(place: Path, code: str) -> str:
    """What some code prints in a process that has torch and not this package."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code, place], capture_output=True, text=True, cwd=place,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def images(place: Path, shape: tuple[int, int, int]) -> tuple[Path, Tensor]:
    draw = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = (draw.integers(0, 100, (40, *shape)) + 100 * y[:, None, None, None]).astype(np.uint8)
    np.savez(place / "images.npz", x=x, y=y)
    return place / "images.npz", torch.from_numpy(x)


def table(place: Path) -> tuple[Path, Tensor]:
    x, y = 1000 + 50 * np.random.default_rng(0).normal(size=(40, 5)), np.arange(40) % 2
    x[:, 2] += 300 * y
    np.savez(place / "table.npz", x=x.astype(np.float32), y=y)
    return place / "table.npz", torch.from_numpy(x.astype(np.float32))


MADE = {
    "lenet-300-100": lambda place: (*images(place, (1, 8, 8)), {"width": 0.1}),
    "resnet18": lambda place: (*images(place, (3, 16, 16)), {"width": 4, "density": 0.3}),
    "mlp": lambda place: (*table(place), {"width": 0.1, "density": 0.3}),
}


@pytest.fixture(params=MADE)
def built_in(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StoredModel, Tensor]:
    file, x, options = MADE[request.param](tmp_path)
    model = Model.create(tmp_path / "model", request.param, tuple(x.shape[1:]), **options)
    model.learn("other", file, epochs=(1, 1))
    model.learn("a", file, epochs=(8, 8), batch_size=8)
    return model, x


def test_a_baked_module_takes_raw_inputs_and_is_of_use_without_this_package(built_in, tmp_path: Path):
    model, x = built_in
    baked = model.bake("a")
    assert type(baked) is nn.Sequential
    with torch.no_grad():
        logits = baked(x)
    torch.testing.assert_close(logits.softmax(1), model.probabilities(x, "a"), rtol=0, atol=1e-6)
    assert {type(part).__module__.partition(".")[0] for part in baked.modules()} == {"torch"}
    torch.save(baked, tmp_path / "baked.pt")
    torch.save(x, tmp_path / "x.pt")
    told = elsewhere(tmp_path, "m = torch.load('baked.pt', weights_only=False); print(m(torch.load('x.pt')).tolist())")
    assert json.loads(told) == logits.tolist()
    scripted = torch.jit.trace(baked, x[:2])
    with torch.no_grad():
        assert torch.equal(scripted(x), logits)


def test_a_module_of_one_s_own_is_baked_as_it_is(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body, self.head = nn.Linear(5, 20), nn.Linear(20, 2)\n"
        "    def forward(self, x):\n"
        "        if x.mean() > 1e9:\n"  # no tracing could follow it
        "            return x\n"
        "        return self.head(self.body(x).relu())\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        from mine import Mine  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    file, x = table(tmp_path)
    model = Model.create(tmp_path / "model", Mine(), input=(5,), density=0.5)
    model.learn("a", file, **QUICK)
    baked = model.bake("a")
    assert type(baked.network) is Mine
    torch.testing.assert_close(baked(x).softmax(1), model.probabilities(x, "a"))
    torch.save(baked, tmp_path / "baked.pt")
    torch.save(x, tmp_path / "x.pt")
    told = elsewhere(tmp_path, "m = torch.load('baked.pt', weights_only=False); print(m(torch.load('x.pt')).tolist())")
    assert json.loads(told) == baked(x).tolist()


def test_a_module_in_double_precision_gets_inputs_in_it(tmp_path: Path):
    module = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2)).double()
    file, x = table(tmp_path)
    model = Model.create(tmp_path / "model", module, input=(5,), density=0.5)
    model.learn("a", file, **QUICK)
    torch.testing.assert_close(model.bake("a")(x).softmax(1), model.probabilities(x, "a"))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_state_dict_says_how_its_inputs_are_scaled(built_in, tmp_path: Path, form: str):
    model, x = built_in
    model.export("a", tmp_path / "a", form)
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["inputs"] == "scaled"
    scaling, shape = told["scaling"], (-1, *[1] * (x.ndim - 2))
    mean, std = (torch.tensor(scaling[key]).view(shape) for key in ("mean", "std"))
    scaled = (x.float() * scaling.get("scale", 1.0) - mean) / std
    read = "torch.load('a', weights_only=True)" if form == "torch" else "safetensors.torch.load_file('a')"
    names = elsewhere(tmp_path, f"import safetensors.torch; print(','.join(sorted({read})))")
    baked = model.bake("a")
    assert names.strip().split(",") == sorted(baked.network.state_dict())
    state = load_file(tmp_path / "a") if form == "safetensors" else torch.load(tmp_path / "a", weights_only=True)
    with torch.no_grad():
        for parameter in baked.network.parameters():
            parameter.zero_()
        baked.network.load_state_dict(state)
        found = baked.network(scaled).argmax(1)
    assert torch.equal(found, model.predict(x, "a"))


def test_unscaled_examples_are_said_to_be_raw(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "a", 1)
    model.export("a", tmp_path / "a")
    told = json.loads((tmp_path / "a.json").read_text())
    assert told["inputs"] == "raw"
    assert "scaling" not in told


def test_onnx_takes_raw_inputs_and_mentions_no_scaling(built_in, tmp_path: Path):
    need("onnxruntime", "pip install 'exssnet[onnx]'")
    import onnxruntime

    model, x = built_in
    model.export("a", tmp_path / "a.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    assert told["inputs"] == "raw"
    assert "scaling" not in "".join((*told, *told.values()))
    (found,) = session.run(["logits"], {"input": x.float().numpy()})
    assert found.argmax(1).tolist() == model.predict(x, "a").tolist()


def test_a_program_takes_raw_inputs_and_needs_nobody_s_classes(built_in, tmp_path: Path):
    model, x = built_in
    model.export("a", tmp_path / "a.pt2", "pt2")
    torch.save(x.float(), tmp_path / "x.pt")
    told = elsewhere(tmp_path, (
        "import json; more = {'exssnet.json': ''}; program = torch.export.load('a.pt2', extra_files=more)\n"
        "told = json.loads(more['exssnet.json'])\n"
        "print(json.dumps([told['inputs'], told['labels'], program.module()(torch.load('x.pt')).argmax(1).tolist()]))"
    ))  # fmt: skip
    assert json.loads(told) == ["raw", list(model.task("a").labels), model.predict(x, "a").tolist()]


def test_an_export_does_not_say_where_examples_lie_on_this_machine(built_in, tmp_path: Path):
    model, _ = built_in
    assert str(tmp_path) in json.dumps(model.card("a")["source"])
    for form in ("safetensors", "torch", "pt2", "model"):
        model.export("a", tmp_path / "out" / form, form)
    written = b"".join(file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert len(written) > 1000
    assert str(tmp_path).encode() not in written


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = create(tmp_path / "model")
    learn(model, "a", 1)
    (tmp_path / "out").mkdir()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    for form in ("safetensors", "torch", "pt2"):
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="cannot be written: No space left on device"):
            model.export("a", tmp_path / "out/a", form)
        assert list((tmp_path / "out").iterdir()) == []
        monkeypatch.undo()


# --- And back ------------------------------------------------------------------------------------------------


def test_an_exported_task_can_be_imported(tmp_path: Path):
    here, there = create(tmp_path / "here"), create(tmp_path / "there")
    learn(here, "a", 1)
    for number, name in enumerate("abc"):
        learn(there, name, 5 + number, classes=3)
    there.export("c", tmp_path / "c")
    wanted = here.model.logits(X, "a"), there.model.logits(X, "c")
    assert here.import_task(tmp_path / "c") == "c"
    assert here.import_task(tmp_path / "c", name="again") == "again"
    for model in (here, Model.open(tmp_path / "here")):
        assert torch.equal(model.model.logits(X, "a"), wanted[0])
        for name in ("c", "again"):
            assert torch.equal(model.model.logits(X, name), wanted[1])
            assert model.task(name).digest == there.task("c").digest
            assert model.task(name).lender is None
        assert model.verify().verified
    learn(here, "more", 9)


@pytest.mark.parametrize("own", [Own, None])
def test_norm_statistics_and_private_tensors_come_along(tmp_path: Path, own: type[nn.Module] | None):
    options = {"input": (3, 16, 16), "width": 4} if own is None else {"input": (12,), "private": ("norm", "bias")}
    torch.manual_seed(0)
    module = own() if own else "resnet18"
    made = [Model.create(tmp_path / name, module, density=0.3, **options) for name in ("here", "there")]
    x = torch.randn(16, *options["input"])
    made[1].learn("a", (x, torch.arange(16) % 2), **QUICK)
    made[1].export("a", tmp_path / "a")
    made[0].import_task(tmp_path / "a")
    assert torch.equal(made[0].model.logits(x, "a"), made[1].model.logits(x, "a"))
    assert made[0].verify().verified


def test_a_file_that_does_not_hold_its_task_changes_nothing(tmp_path: Path):
    here, there = create(tmp_path / "here"), create(tmp_path / "there")
    learn(there, "a", 1)
    there.export("a", tmp_path / "good")
    state, told = load_file(tmp_path / "good"), json.loads((tmp_path / "good.json").read_text())
    before = content(tmp_path / "here")

    def refused(said: str, state: dict[str, Tensor], told: object, kind: type[Exception] = StoreError) -> None:
        save_file(state, tmp_path / "bad")
        (tmp_path / "bad.json").write_text(json.dumps(told))
        with pytest.raises(kind, match=said):
            here.import_task(tmp_path / "bad")
        assert content(tmp_path / "here") == before

    card = told["card"]
    refused("does not have the task", state | {"head.weight": state["head.weight"] + 1}, told)
    refused("does not have the task", {name: tensor for name, tensor in state.items() if name != "head.weight"}, told)
    refused("does not have the task", state, told | {"card": card | {"labels": ["x", "y"]}})
    refused("have different bases", state, told | {"base": {"first": "0" * 64, "structure": []}}, InputError)
    refused("have different bases", state, told | {"base": {}}, InputError)
    refused("is not the card of a task|card", state, told | {"card": {}})
    refused("does not name the base of its task", state, {**told, "card": 7})
    refused("cannot be read", state, [1])
    there.export("a", tmp_path / "a.pt", "torch")
    with pytest.raises(StoreError, match=r"a\.pt cannot be read as a task exported as safetensors"):
        here.import_task(tmp_path / "a.pt")
    with pytest.raises(StoreError, match=r"cannot be read as a task exported as safetensors: .*: No such file"):
        here.import_task(tmp_path / "none")


def test_tensors_of_another_shape_are_refused_though_the_card_is_theirs(tmp_path: Path):
    here, there = create(tmp_path / "here"), create(tmp_path / "there")
    learn(there, "a", 1)
    there.export("a", tmp_path / "a")
    told = json.loads((tmp_path / "a.json").read_text())
    for name, tensor in (("head.weight", torch.zeros(3, 5)), ("hidden.1.weight", torch.zeros(12, 15))):
        state = load_file(tmp_path / "a") | {name: tensor}
        card = told["card"] | {"task": told["card"]["task"] | {"digests": digests_of(state)}}
        card["digest"] = identity(card)
        save_file(state, tmp_path / "a")
        (tmp_path / "a.json").write_text(json.dumps(told | {"card": card}))
        with pytest.raises(StoreError, match=f"'{name}' does not match the network"):
            here.import_task(tmp_path / "a")
        there.export("a", tmp_path / f"b {name}")
        (tmp_path / f"b {name}").replace(tmp_path / "a")
    assert here.tasks == ()


def test_a_directory_needs_the_name_of_a_task(tmp_path: Path):
    here, there = create(tmp_path / "here"), create(tmp_path / "there")
    learn(there, "a", 1)
    with pytest.raises(InputError, match=r"give a task of .*there: it has a"):
        here.import_task(there)
