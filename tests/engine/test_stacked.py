"""A batch of rows of several tasks gives what one task after the other gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.networks import Transformer, mlp
from torch import Tensor, nn

from exssnet import InputError
from exssnet.core import changes
from exssnet.core.network import MaskedNetwork
from exssnet.engine import stacked
from exssnet.engine.stacked import FEW_ROWS, Stacked

CLASSES = (2, 5, 3, 2)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 2),
    )  # fmt: skip


class Branching(nn.Module):
    """Looks at its numbers to decide what to do, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.relu() if float(hidden.sum()) > -1e9 else hidden)


NETWORKS = {
    "mlp with batch norm": (mlp, lambda n, draw: torch.randn(n, 12, generator=draw)),
    "convolutional": (convolutional, lambda n, draw: torch.randn(n, 2, 7, 7, generator=draw)),
    "transformer": (Transformer, lambda n, draw: torch.randint(0, 20, (n, 8), generator=draw)),
    "not for vmap": (Branching, lambda n, draw: torch.randn(n, 12, generator=draw)),
}
OPTIONS = {"private heads": {"head": "task", "private": ("norm", "bias")}, "plain": {"head": "task"}}


def learn(net: MaskedNetwork, name: str, classes: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(net.layout.size, generator=draw) < 0.4
    index = net.bank.free(mask).nonzero().view(-1)
    own = {
        key: t.detach() + 0.3 * torch.rand(t.shape, generator=draw) if t.is_floating_point() else t
        for key, t in net.start_private(name, classes).items()
    }
    net.commit(name, classes, mask, index, 0.4 * torch.randn(len(index), generator=draw), own)


def network(kind: str, options: str = "private heads") -> MaskedNetwork:
    torch.manual_seed(0)
    words = OPTIONS[options] if kind != "mlp with batch norm" else {"head": "task"}
    net = MaskedNetwork(NETWORKS[kind][0](), 0.4, init="keep", **words)
    for number, classes in enumerate(CLASSES):
        learn(net, f"task{number}", classes, number)
    return net


def assert_as_one_by_one(net: MaskedNetwork, found: dict[str, Tensor], groups: dict[str, Tensor]) -> None:
    assert found.keys() == groups.keys()
    for name, x in groups.items():
        alone = net.logits(x, name)
        assert found[name].shape == alone.shape
        torch.testing.assert_close(found[name], alone, rtol=1e-4, atol=1e-5)
        assert torch.equal(found[name].argmax(1), alone.argmax(1))


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_row_gets_what_its_own_task_gives_it(kind: str, options: str):
    net = network(kind, options)
    batches = Stacked(net)

    @given(st.dictionaries(st.integers(0, 3), st.integers(1, 9) | st.just(FEW_ROWS + 3), min_size=1), st.integers(0))
    @settings(max_examples=15)
    def check(rows: dict[int, int], seed: int):
        draw = torch.Generator().manual_seed(seed % 2**31)
        groups = {f"task{number}": NETWORKS[kind][1](count, draw) for number, count in rows.items()}
        assert_as_one_by_one(net, batches.logits(groups), groups)

    check()


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_row_is_given_a_class_that_its_task_does_not_have(kind: str):
    """Heads are filled up with zeros: no answer where all of a task's own logits are below zero."""
    net = network(kind)
    heads = {f"{net.partition.head}.weight", f"{net.partition.head}.bias"}
    for learned in net.tasks.values():
        for name in heads & learned.private.keys():
            learned.private[name].abs_().neg_()
    draw = torch.Generator().manual_seed(0)
    x = NETWORKS[kind][1](40, draw)
    rows = {name: list(range(number, 40, 4)) for number, name in enumerate(net.tasks)}
    found = Stacked(net).classes(x, rows)
    for name, places in rows.items():
        assert torch.equal(found[places], net.logits(x[places], name).argmax(1))


@pytest.mark.parametrize(("kind", "stacks"), [("mlp with batch norm", True), ("transformer", False),
                                              ("convolutional", False), ("not for vmap", False)])  # fmt: skip
def test_tasks_are_stacked_where_the_network_allows_it(kind: str, stacks: bool):
    net = network(kind)
    batches = Stacked(net)
    groups = {f"task{number}": NETWORKS[kind][1](3, torch.Generator()) for number in range(4)}
    assert_as_one_by_one(net, batches.logits(groups), groups)
    assert_as_one_by_one(net, batches.logits(groups), groups)
    assert (batches._stackable and len(batches._stacks) == 1) == stacks


def test_a_task_learned_anew_under_the_same_name_is_the_new_one():
    net = network("mlp with batch norm")
    first = net.weights.clone()
    batches = Stacked(net)
    groups = {name: torch.randn(2, 12, generator=torch.Generator().manual_seed(9)) for name in ("task0", "task1")}
    old = batches.logits(groups)
    changes.remove(net, "task1", first)
    with pytest.raises(InputError, match="no task 'task1'"):
        batches.logits(groups)
    learn(net, "task1", 4, seed=99)
    found = batches.logits(groups)
    assert_as_one_by_one(net, found, groups)
    assert torch.equal(found["task0"], old["task0"]) or torch.allclose(found["task0"], old["task0"], atol=1e-5)
    assert found["task1"].shape == (2, 4)


def test_stacks_never_take_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch):
    net = network("mlp with batch norm")
    monkeypatch.setattr(stacked, "STACKED_BYTES", 3 * 4 * net.layout.size)
    batches = Stacked(net)
    for names in ([0, 1], [2, 3], [0, 1, 2], [1, 2], [0, 1, 2, 3]):
        groups = {f"task{number}": torch.randn(2, 12) for number in names}
        assert_as_one_by_one(net, batches.logits(groups), groups)
        assert sum(map(len, batches._stacks)) <= 3


@pytest.mark.parametrize("kind", ["mlp with batch norm", "convolutional"])
def test_inputs_that_do_not_fit_get_one_line_and_spoil_nothing(kind: str):
    net = network(kind)
    batches = Stacked(net)
    with pytest.raises(InputError, match="the module cannot take inputs of shape"):
        batches.logits({"task0": torch.randn(2, 5), "task1": torch.randn(2, 5)})
    groups = {f"task{number}": NETWORKS[kind][1](3, torch.Generator()) for number in range(2)}
    assert_as_one_by_one(net, batches.logits(groups), groups)
    assert batches._stackable == (kind != "convolutional")


def test_no_rows_give_no_answers():
    assert Stacked(network("mlp with batch norm")).logits({}) == {}
