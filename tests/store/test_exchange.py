"""Tasks that leave a directory and tasks that come into it compute what they always did."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from tests.core.networks import Transformer
from tests.parts import need
from tests.store.small import QUICK, Own, X, content, create, examples, learn, logits, same
from torch import Tensor, nn

from exssnet import InputError, Model, StoreError
from exssnet.models import build
from exssnet.store.exchange import load_exported
from exssnet.store.stored_model import StoredModel

DIGITS = load_digits()
PIXELS = DIGITS.images.astype(np.uint8)[:, None]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Raw pixels, a scaling in the model: exported tasks have to bring it."""
    place = tmp_path_factory.mktemp("digits")
    model = Model.create(place / "model", "lenet-300-100", input=(1, 8, 8), width=0.1, density=0.2)
    for name, wanted in (("low", DIGITS.target < 3), ("high", DIGITS.target > 5)):
        np.savez(place / "data.npz", x=PIXELS[wanted], y=DIGITS.target[wanted])
        model.learn(name, place / "data.npz", **QUICK)
    return model


def raw(count: int = 50) -> Tensor:
    return torch.from_numpy(PIXELS[:count])


# --- Out -----------------------------------------------------------------------------------------------------


def test_an_exported_state_dict_is_all_a_plain_module_needs(digits: StoredModel, tmp_path: Path):
    for task in ("low", "high"):
        module = digits.export(task, tmp_path / f"deep/er/{task}.safetensors")
        told = json.loads((tmp_path / f"deep/er/{task}.safetensors.json").read_text())
        assert told["labels"] == list(digits.task(task).labels)
        plain = build(told["network"], told["input"], len(told["labels"]), told["width"]).eval()
        plain.load_state_dict(load_file(tmp_path / f"deep/er/{task}.safetensors"))
        scaling = told["scaling"]
        scaled = (raw().float() * scaling["scale"] - torch.tensor(scaling["mean"])) / torch.tensor(scaling["std"])
        wanted = digits.model.logits(scaled, task)
        assert torch.equal(plain(scaled), wanted)
        assert torch.equal(module(raw()), wanted)
        assert torch.equal(plain(scaled).argmax(1), digits.predict(raw(), task))


def test_an_exported_convolutional_network_has_its_statistics(tmp_path: Path):
    model = Model.create(tmp_path / "model", "resnet18", input=(3, 16, 16), width=2, density=0.3, private=("norm",))
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8, generator=draw)
    for task in ("a", "b"):
        model.learn(task, (x, torch.arange(16) % 2), **QUICK)
    model.export("b", tmp_path / "b")
    plain = build("resnet18", (3, 16, 16), 2, 2).eval()
    plain.load_state_dict(load_file(tmp_path / "b"))
    with torch.no_grad():
        torch.testing.assert_close(plain(x.float() / 255), model.model.logits(x, "b"))
        assert torch.equal(plain(x.float() / 255).argmax(1), model.predict(x, "b"))


def test_nothing_is_overwritten_by_an_export(digits: StoredModel, tmp_path: Path):
    for name in ("a.json", "b", "b.json"):
        (tmp_path / name).write_text("mine")
    for out in ("a.json", "b", "b.json"):
        for form in ("torch", "onnx", "model"):
            with pytest.raises(InputError, match="exists: choose another name"):
                digits.export("low", tmp_path / out, form)
    (tmp_path / "c.json").write_text("mine")
    with pytest.raises(InputError, match=r"c\.json exists: choose another name"):
        digits.export("low", tmp_path / "c")
    assert {file.read_text() for file in tmp_path.iterdir()} == {"mine"}
    with pytest.raises(InputError, match="format is 'tf'"):
        digits.export("low", tmp_path / "d", "tf")
    with pytest.raises(InputError, match="no task 'none'"):
        digits.export("none", tmp_path / "d")
    with pytest.raises(StoreError, match="cannot be written"):
        digits.export("low", tmp_path / "b" / "d")
    assert not (tmp_path / "d").exists()


def test_an_exported_module_can_be_trained_on_without_touching_the_model(digits: StoredModel, tmp_path: Path):
    before = digits.predict(raw(), "low"), [task.digest for task in digits.model.tasks]
    module = digits.export("low", tmp_path / "low")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert torch.equal(digits.predict(raw(), "low"), before[0])
    assert [digits.model.verify().digests[task.name] for task in digits.tasks] == before[1]


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 2)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()).relu())


@pytest.mark.parametrize("kind", [Own, Tied])
def test_modules_of_one_s_own_are_exported_too(tmp_path: Path, kind: type[nn.Module]):
    model = Model.create(tmp_path / "model", kind(), input=(12,), density=0.3, private=("bias",))
    learn(model, "a", 1)
    model.export("a", tmp_path / "a")
    plain = kind().eval()
    plain.load_state_dict(load_file(tmp_path / "a"))
    assert torch.equal(plain(X), model.model.logits(X, "a"))


def test_onnxruntime_computes_the_task_from_raw_inputs(digits: StoredModel, tmp_path: Path):
    need("onnxruntime", "pip install 'exssnet[onnx]'")
    import onnxruntime

    module = digits.export("high", tmp_path / "high.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "high.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["labels"]) == ["6", "7", "8", "9"]
    for rows in (1, 2, 50):
        (found,) = session.run(["logits"], {"input": raw(rows).float().numpy()})
        np.testing.assert_allclose(found, module(raw(rows)).detach().numpy(), rtol=1e-4, atol=1e-5)
        assert found.argmax(1).tolist() == digits.predict(raw(rows), "high").tolist()


def test_a_network_that_takes_words_is_exported_with_whole_numbers(tmp_path: Path):
    need("onnxruntime", "pip install 'exssnet[onnx]'")
    import onnxruntime

    words = torch.randint(0, 20, (24, 8), generator=torch.Generator().manual_seed(0))
    model = Model.create(tmp_path / "model", Transformer(), input=(8,), density=0.3)
    model.learn("words", (words, words[:, 0] % 2), **QUICK)
    module = model.export("words", tmp_path / "words", "torch")
    torch.testing.assert_close(module(words).argmax(1), model.predict(words, "words"))
    model.export("words", tmp_path / "words.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "words.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"input": words.numpy()})
    assert found.argmax(1).tolist() == model.predict(words, "words").tolist()


@pytest.mark.parametrize("own", [False, True])
def test_a_task_in_a_directory_of_its_own_is_a_model_like_any_other(tmp_path: Path, own: bool):
    module = Own() if own else None
    model = Model.create(tmp_path / "m", module, input=(12,), density=0.2) if own else create(tmp_path / "m")
    for number in range(3):
        learn(model, f"task{number}", number)
    model.export("task2", tmp_path / "alone", "model")
    alone = Model.open(tmp_path / "alone", module)
    assert alone.verify().verified
    assert [task.name for task in alone.tasks] == ["task2"]
    assert alone.tasks[0].lender is None
    assert torch.equal(alone.model.logits(X, "task2"), model.model.logits(X, "task2"))
    assert alone.tasks[0].digest == model.tasks[2].digest
    assert alone.summary()["bytes"] < model.summary()["bytes"]
    learn(alone, "more", 7)
    assert alone.verify().verified


# --- In ------------------------------------------------------------------------------------------------------


def test_tasks_of_two_directories_live_in_one(tmp_path: Path):
    """Both used the same weights, and trained them to other values."""
    here, there = create(tmp_path / "here", density=0.5), create(tmp_path / "there", density=0.5)
    for number in range(2):
        learn(here, f"here{number}", number)
        learn(there, f"there{number}", 10 + number, classes=3)
    wanted = logits(here) | logits(there)
    digests = {task.name: task.digest for task in (*here.tasks, *there.tasks)}
    for name in ("there1", "there0"):
        here.import_task(there, name)
    assert here.model.network.task("there1").override is not None
    for model in (here, Model.open(tmp_path / "here")):
        assert same(logits(model), wanted)
        assert {task.name: task.digest for task in model.tasks} == digests
        assert model.verify().verified
        names = [name for name in wanted for _ in range(2)]
        found = model.predict(X[:8], tasks=names)
        assert found.tolist() == [int(wanted[name][row].argmax()) for row, name in enumerate(names)]
    assert [task.lender for task in here.tasks] == [None, "here0", None, None]  # there0 came after

    here.remove("here0")  # what was apart stays apart
    del wanted["here0"]
    assert same(logits(here), wanted)
    learn(here, "more", 30)
    here.export("there1", tmp_path / "out", "model")
    here.rename("there1", "guest")
    assert torch.equal(Model.open(tmp_path / "out").model.logits(X, "there1"), wanted["there1"])
    again = Model.open(tmp_path / "here")
    assert torch.equal(again.model.logits(X, "guest"), wanted["there1"])
    assert again.verify().verified
    assert torch.equal(again.bake("guest")(X), wanted["there1"])
    learn(again, "from a guest's mask", 11)
    again.remove("guest")
    del wanted["there1"]
    assert same({name: again.model.logits(X, name) for name in wanted}, wanted)


def test_the_lender_of_an_imported_task_is_named_only_if_it_is_the_same_task(tmp_path: Path):
    there = create(tmp_path / "there")
    learn(there, "root", 1)
    learn(there, "leaf", 2)
    assert there.tasks[1].lender == "root"
    here = create(tmp_path / "here")
    here.import_task(there, "root")
    here.import_task(there, "leaf")
    assert here.tasks[1].lender == "root"
    other = create(tmp_path / "other")
    learn(other, "root", 3)  # another task of that name
    other.import_task(there, "leaf")
    assert other.tasks[1].lender is None
    assert torch.equal(other.model.logits(X, "leaf"), there.model.logits(X, "leaf"))


def test_a_task_cannot_come_from_another_base_or_under_a_name_that_is_taken(tmp_path: Path):
    here = create(tmp_path / "here")
    learn(here, "a", 1)
    before, files = logits(here), content(tmp_path / "here")
    for name, options in (("seed", {"seed": 1}), ("width", {"width": 0.06})):
        other = create(tmp_path / name, **options)
        learn(other, "b", 2)
        with pytest.raises(InputError, match="have different bases"):
            here.import_task(other, "b")
    twin = create(tmp_path / "twin", density=0.4)
    learn(twin, "a", 5)
    with pytest.raises(InputError, match="'a' has been learned already"):
        here.import_task(twin, "a")
    with pytest.raises(InputError, match="no task 'c'"):
        here.import_task(twin, "c")
    with pytest.raises(InputError, match="cannot be the name of a task"):
        here.import_task(twin, "a", "x/y")
    assert content(tmp_path / "here") == files
    assert same(logits(here), before)
    here.import_task(twin, "a", "b")
    assert torch.equal(here.model.logits(X, "b"), twin.model.logits(X, "a"))


def test_an_imported_task_can_be_undone(tmp_path: Path):
    here, there = create(tmp_path / "here"), create(tmp_path / "there")
    learn(here, "a", 1)
    learn(there, "b", 2)
    before = logits(here)
    here.import_task(there, "b")
    assert here.rollback() == "import b"
    assert same(logits(here), before)
    assert here.model.evaluate(examples(1), "a") > 50


def test_an_exported_state_dict_gives_its_module_again(digits: StoredModel, tmp_path: Path):
    module = digits.export("low", tmp_path / "low.safetensors")
    again = load_exported(tmp_path / "low.safetensors")
    with torch.no_grad():
        assert torch.equal(again(raw()), module(raw()))
    assert torch.equal(again(raw()).argmax(1), digits.predict(raw(), "low"))
    (tmp_path / "low.safetensors.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        load_exported(tmp_path / "low.safetensors")
