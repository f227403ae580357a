"""Models can be copied, pickled and printed, and a copy goes its own way."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.core.networks import Transformer, mlp
from tests.store.small import QUICK, X, create, learn, logits, same
from torch import Tensor

import exssnet
from exssnet import Model
from exssnet.core import changes
from exssnet.models import build


def saved(model: Model) -> Model:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS: dict[str, Callable] = {
    "deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "torch.save": saved,
}  # fmt: skip
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KINDS = {
    "mlp": lambda: (mlp(), lambda seed: draw(seed, 32, 12)),
    "resnet": lambda: (build("resnet18", (3, 16, 16), 2, width=4), lambda seed: draw(seed, 32, 3, 16, 16)),
    "transformer": lambda: (
        Transformer(), lambda seed: torch.randint(0, 20, (32, 8), generator=torch.Generator().manual_seed(seed))
    ),
}  # fmt: skip


def tensors(model: Model) -> dict[str, Tensor]:
    network = model.network
    return (
        changes.state(network)[0]
        | network.frozen
        | network.buffers
        | {f"p {n}": t for n, t in network.private_start.items()}
    )


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_same_and_goes_its_own_way(way: Callable, kind: str):
    torch.manual_seed(0)
    module, inputs = KINDS[kind]()
    model, y = Model(module, density=0.3, head="task"), torch.arange(32) % 2
    for number in range(2):
        model.learn(f"task {number}", (inputs(number), y), epochs=(2, 2), batch_size=16)
    before = {task.name: model.logits(inputs(9), task.name) for task in model.tasks}
    kept = {name: tensor.clone() for name, tensor in tensors(model).items()}
    other = way(model)
    assert type(other) is Model
    assert other.config == model.config
    assert type(other.network.engine) is type(model.network.engine)
    assert [task.digest for task in other.tasks] == [task.digest for task in model.tasks]
    assert same({name: other.logits(inputs(9), name) for name in before}, before)
    assert other.verify().verified
    ours = {tensor.data_ptr() for tensor in tensors(model).values() if tensor.numel()}
    assert not ours & {tensor.data_ptr() for tensor in tensors(other).values()}

    learned = other.learn("more", (inputs(3), 1 - y), epochs=(2, 2), batch_size=16)
    assert [task.name for task in model.tasks] == ["task 0", "task 1"]
    assert same(tensors(model), kept)
    assert same({name: model.logits(inputs(9), name) for name in before}, before)
    assert model.learn("more", (inputs(3), 1 - y), epochs=(2, 2), batch_size=16).digest == learned.digest


@ways
def test_a_copy_of_an_opened_directory_answers_by_itself(way: Callable, tmp_path: Path):
    model = create(tmp_path / "model")
    for number in range(2):
        learn(model, f"task {number}", number)
    model.predict(X, tasks=["task 0"] * 5 + ["task 1"] * 4)
    before = logits(model)
    other = way(model)
    assert same(logits(other), before)
    assert other.predict(X, tasks=["task 0"] * 9).tolist() == before["task 0"].argmax(1).tolist()
    learn(other, "more", 5)
    assert same(logits(model), before)  # as it was opened
    learn(model, "and more", 6)  # a change begins from what is on disk now
    assert [task.name for task in Model.open(tmp_path / "model").tasks] == ["task 0", "task 1", "more", "and more"]
    assert model.verify().verified


def test_a_model_is_shown_in_a_line(tmp_path: Path):
    model = Model(mlp(), density=0.1)
    assert repr(model) == f"Model({model.network.layout.size:,} weights, 100.0 % of them free; 0 tasks)"
    for number in range(7):
        model.learn(f"task {number}", (draw(number, 32, 12), torch.arange(32) % 2), epochs=(1, 0))
    assert repr(model).endswith("free; 7 tasks: 'task 0', 'task 1', 'task 2', 'task 3', 'task 4', ...)")
    shown = repr(model.tasks[:1])
    assert shown.startswith("(LearnedTask(name='task 0', classes=2, lender=None, overlap=None, trained_weights=")
    assert len(shown) < 120

    stored = create(tmp_path / "model")
    assert repr(stored) == f"StoredModel({str(tmp_path / 'model')!r}, lenet-300-100; 0 tasks)"
    learn(stored, "a", 1)
    learn(stored, "b", 2, classes=3)
    assert repr(stored).endswith("model', lenet-300-100; 2 tasks: 'a', 'b')")
    task = stored.tasks[1]
    right = f"accuracy {task.accuracy:.1f} %"
    lender = "" if task.lender is None else f", lender '{task.lender}'"
    assert repr(task) == f"StoredTask('b', 3 classes, {right}{lender}, digest {task.digest[:16]})"
    for file in (tmp_path / "model/files").iterdir():
        file.write_bytes(b"")
    assert "2 tasks: 'a', 'b'" in repr(Model.open(tmp_path / "model"))  # also where nothing else can be read


def test_the_package_lists_what_it_has_without_importing_torch():
    assert set(exssnet.__all__) <= set(dir(exssnet))
    code = "import sys, exssnet; assert 'Model' in dir(exssnet); assert 'torch' not in sys.modules; exssnet.Model"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_without_tasks_can_be_copied():
    assert copy.deepcopy(Model(mlp())).learn("a", (draw(0, 32, 12), torch.arange(32) % 2), **QUICK).classes == 2
