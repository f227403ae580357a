"""Routing against its definition on random networks."""

import itertools
import math
from functools import partial

import pytest
import torch
from tests.core.networks import mlp
from tests.core.superposed import NETWORKS, OPTIONS, ROWS, case, drawn, entropy_at, rows, same, slopes
from torch import nn

from exssnet import InputError
from exssnet.core import changes
from exssnet.core.network import MaskedNetwork
from exssnet.core.routing import rules as routing
from exssnet.core.routing import superposition
from exssnet.core.routing.rules import RULES
from exssnet.core.routing.superposition import Superposition
from exssnet.engine.cpu.engine import CpuEngine

route = partial(routing.route, statistics="tasks")  # those of the batch: test_routing_statistics.py


@pytest.mark.parametrize("classes", [(3, 3, 3, 3, 3), (3, 2, 5)], ids=["equal", "unequal"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_one_shot_scores_are_the_entropys_slopes_along_each_task(kind, options, classes):
    network, module, x = case(kind, options, classes)
    expected = slopes(network, module, x, tuple(network.tasks))
    found = route(network, x, "one-shot")
    same(found.scores, expected)
    assert found.tasks == tuple(network.tasks)
    assert torch.equal(found.choice, expected.argmax(1))
    same(route(network, x, "one-shot", chunk=3).scores, expected)

    of_batch = route(network, x, "one-shot", per="batch", chunk=3)
    same(of_batch.scores, expected.mean(0).expand(ROWS, -1))
    assert of_batch.choice.tolist() == [int(expected.mean(0).argmax())] * ROWS


@pytest.mark.parametrize("kind", ["mlp", "convolutional", "transformer"])
def test_common_layers_have_forward_mode_which_gives_what_backward_gives(kind, monkeypatch):
    network, _, x = case(kind, "private")
    backward = Superposition(network, list(network.tasks))._row_by_row(x, range(5))
    monkeypatch.setattr(Superposition, "_row_by_row", lambda *_: pytest.fail("one row at a time"))
    torch.testing.assert_close(route(network, x, "one-shot").scores, backward, rtol=1e-9, atol=1e-14)


def halving(slopes_among, count) -> tuple[int, dict[int, float]]:
    """One case, by the definition: the task that is left, and the last score of each."""
    left, last = list(range(count)), {}
    for _ in range(math.ceil(math.log2(count))):
        last |= dict(zip(left, slopes_among(left), strict=True))
        best = sorted(left, key=last.__getitem__, reverse=True)
        left = sorted(best[: (len(left) + 1) // 2])
    return left[0], last


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("classes", [(3,) * 6, (3, 2, 5, 4, 2)], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", ["mlp", "convolutional"])
def test_binary_halves_the_candidates_of_each_case_for_itself(kind, classes, per):
    network, module, x = case(kind, "private", classes)
    found = route(network, x, "binary", per=per)
    for number, own in enumerate(x.split(1) if per == "row" else [x]):

        def among(left, own=own):
            return slopes(network, module, own, [str(task) for task in left]).mean(0)

        choice, last = halving(among, len(classes))
        assert int(found.choice[number]) == choice
        same(found.scores[number], torch.stack([last[task] for task in range(len(classes))]))
    if kind == "mlp":  # its rows go different ways
        assert (len(set(found.choice.tolist())) == 1) == (per == "batch")


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("kind", ["mlp", "no forward mode"])
def test_of_two_tasks_binary_chooses_as_one_shot_does(kind, per):
    network, _, x = case(kind, "private")
    for pair in itertools.combinations(network.tasks, 2):
        once, halved = (route(network, x, rule, pair, per) for rule in ("one-shot", "binary"))
        assert torch.equal(once.choice, halved.choice)
        assert torch.equal(once.scores, halved.scores)


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("rule", RULES)
def test_a_shift_of_all_logits_of_a_task_moves_nothing(rule, per):
    network, _, x = case("mlp", "private", (3, 2, 5))
    expected = route(network, x, rule, per=per)
    network.task("1").private["5.weight"] += torch.randn(40)
    found = route(network, x, rule, per=per)
    assert torch.equal(found.choice, expected.choice)
    same(found.scores, expected.scores)


@pytest.mark.parametrize("scale", [1e-4, 1, 10])
def test_the_entropys_gradient_keeps_its_digits(scale):
    logits = scale * torch.randn(50, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(1)
    (log_p.exp() * log_p).sum().backward()
    found = superposition.descent(logits.float()).double()
    largest = leaf.grad.abs().amax(1, keepdim=True)
    # rounding of the logits themselves counts in proportion to them
    torch.testing.assert_close(found / largest, leaf.grad / largest, rtol=0, atol=2e-6 * max(scale, 1))


@pytest.mark.parametrize("classes", [(3, 3, 3), (3, 2, 5)], ids=["equal", "unequal"])
def test_confident_is_the_lowest_entropy_of_the_baked_modules(classes):
    network, _, x = case("convolutional", "private", classes)
    columns = []
    for name, learned in network.tasks.items():
        p = network.bake(name)(x).softmax(1)
        columns.append((p * p.log()).sum(1).detach() / math.log(learned.classes))
    expected = torch.stack(columns, 1)
    found = route(network, x, chunk=3)
    same(found.scores, expected)
    assert torch.equal(found.choice, expected.argmax(1))
    same(route(network, x, per="batch", chunk=3).scores, expected.mean(0).expand(ROWS, -1))


@pytest.mark.parametrize("rule", RULES)
def test_only_the_named_tasks_are_candidates(rule):
    network, _, x = case("mlp", "shared")
    found = route(network, x, rule, ["4", "1", "2"])
    assert found.tasks == ("4", "1", "2")
    assert found.scores.shape == (ROWS, 3)
    assert (found.choice.dtype, found.choice.shape) == (torch.int64, (ROWS,))
    same(route(network, x, rule, ["2", "4", "1"]).scores, found.scores[:, [2, 0, 1]])
    assert route(network, x, rule, ["3"]).choice.tolist() == [0] * ROWS


@pytest.mark.parametrize("rule", RULES)
def test_tensors_that_are_not_held_give_the_same(rule, monkeypatch):
    network, _, x = case("convolutional", "private")
    held = route(network, x, rule)
    monkeypatch.setattr(superposition, "HELD", 0)
    assert torch.equal(route(network, x, rule).scores, held.scores)


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", NETWORKS)
def test_routing_changes_nothing(kind, rule, per):
    network, _, x = case(kind, "private")

    def everything():
        tensors, cards = changes.state(network)
        return tensors | network.frozen | network.buffers, cards

    tensors, cards = everything()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    logits, given = network.logits(x, "0"), x.clone()
    route(network, x, rule, per=per)
    now, cards_now = everything()
    assert cards_now == cards
    assert list(now) == list(kept)
    for name, tensor in now.items():
        assert torch.equal(tensor, kept[name])
        assert not tensor.requires_grad
        assert tensor.grad is None
    assert network.verify().verified
    assert torch.equal(network.logits(x, "0"), logits)
    assert torch.equal(x, given)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["mlp", "no forward mode"])
def test_routing_works_under_any_mode_of_autograd(kind, rule):
    network, _, x = case(kind, "private")
    expected = route(network, x, rule)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            found = route(network, x.clone(), rule)
        assert torch.equal(found.scores, expected.scores)
        assert not found.scores.requires_grad


@pytest.mark.parametrize("rule", RULES)
def test_another_execution_routes_the_same(rule):
    network, _, x = case("convolutional", "shared")
    expected = route(network, x, rule)
    network.use(CpuEngine())
    same(route(network, x, rule).scores, expected.scores)


def test_a_fixed_bias_of_the_head_may_have_more_outputs_than_any_task():
    network = drawn(nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8)), (2, 4))
    for rule in RULES:
        assert route(network, rows(5, 12), rule).choice.shape == (5,)


@pytest.mark.parametrize("per", ["row", "batch"])
@pytest.mark.parametrize("rule", RULES)
def test_no_rows_have_no_tasks(rule, per):
    network, _, x = case("mlp", "shared")
    found = route(network, x[:0], rule, per=per)
    assert found.choice.shape == (0,)
    assert found.scores.shape == (0, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "one shot"}, "unknown rule 'one shot': did you mean one-shot?"),
        ({"per": "image"}, "per is 'image': choose one of row, batch"),
        ({"chunk": 0}, "chunk is 0: give a whole number from 1"),
        ({"tasks": ["0", "9"]}, "no task '9' has been learned (learned: 0, 1, 2, 3, 4)"),
        ({"tasks": ["0", "0"]}, "a task is named twice among 0, 0: name each once"),
        ({"tasks": []}, "there is no task to choose from: learn one first, or name at least one"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(arguments, message):
    network, _, x = case("mlp", "shared")
    with pytest.raises(InputError) as error:
        route(network, x, **arguments)
    assert str(error.value) == message


def test_without_a_task_there_is_nothing_to_choose_from():
    with pytest.raises(InputError, match="there is no task to choose from: learn one first"):
        route(MaskedNetwork(mlp(), density=0.5), torch.randn(2, 12))


@pytest.mark.parametrize("kind", ["mlp", "convolutional", "no forward mode"])
@pytest.mark.parametrize("per", ["row", "batch"])
def test_slopes_of_tasks_that_scale_their_inputs_each_in_its_way(kind, per):
    network, module, x = case(kind, "private")
    names = list(network.tasks)
    draw = torch.Generator().manual_seed(5)
    shape = (x.shape[1], *[1] * (x.ndim - 2))
    scalings = {
        name: (1 + torch.rand(shape, generator=draw).double(), torch.randn(shape, generator=draw).double())
        for name in names
    }

    def entropy(alphas):
        seen = sum(alpha * (x * scalings[name][0] + scalings[name][1]) for name, alpha in alphas.items())
        return entropy_at(network, module, seen, alphas)

    step, columns = 1e-5, []
    for name in names:
        less, more = (entropy({o: 1 / 5 + sign * step * (o == name) for o in names}) for sign in (-1, 1))
        columns.append((less - more) / (2 * step))
    wanted = torch.stack(columns, 1)
    if per == "batch":
        wanted = wanted.mean(0).expand(ROWS, -1)
    found = route(network, x, "one-shot", per=per, scalings=scalings)
    torch.testing.assert_close(found.scores, wanted, rtol=1e-4, atol=1e-7)
    assert torch.equal(found.choice, found.scores.argmax(1))


@pytest.mark.parametrize("rule", RULES)
def test_tasks_that_scale_alike_are_found_as_if_the_inputs_were_scaled_before(rule):
    network, _, x = case("mlp", "private")
    alike = (torch.full((12,), 0.5).double(), torch.full((12,), -1.0).double())
    found = route(network, x, rule, scalings=dict.fromkeys(network.tasks, alike))
    before = route(network, x * 0.5 - 1, rule)
    assert torch.equal(found.choice, before.choice)
    if rule == "confident":
        same(found.scores, before.scores)
    if rule == "one-shot":  # along every α the input grows alike, which is the same for all tasks
        same(found.scores.diff(dim=1), before.scores.diff(dim=1))
