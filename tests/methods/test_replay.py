"""Each rule that replays old examples, against an oracle that does not share its code."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.small import batch_of, by_hand, examples, made, normed, statistics_of, task
from torch import nn

from exssnet.methods.replay.agem import projected
from exssnet.methods.replay.icarl import herd
from exssnet.train import Trainer, TrainSettings


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 30))
def test_agem_projects_at_right_angles_and_never_raises_the_old_loss_to_first_order(seed, size):
    draw = torch.Generator().manual_seed(seed)
    gradient, reference = (torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(2))
    found = projected(gradient, reference)
    slope = found @ reference  # what a step against `found` takes off the old loss
    assert slope > -1e-9
    if gradient @ reference >= 0:
        assert torch.equal(found, gradient)
    else:
        assert abs(slope) < 1e-9 * reference.norm() * gradient.norm()
        assert abs((gradient - found) @ found) < 1e-9 * gradient.norm() ** 2
    assert torch.equal(projected(gradient, torch.zeros(size, dtype=torch.float64)), gradient)


def test_agem_uses_the_gradient_of_what_it_remembers():
    torch.manual_seed(0)
    method = made("agem", head="shared", buffer=20, module=normed(3))
    Trainer(method, 0, TrainSettings(10)).learn(task(0))
    new, weights = batch_of(examples(seed=0)), method.network.weights
    new.y = (new.y + 1) % 3  # the same examples, and other answers
    weights.grad = None
    method.loss(new).backward()
    plain, state = weights.grad.clone(), new.generator.get_state()
    old = method.memory.draw(len(new), new.data, new.generator)
    (reference,) = torch.autograd.grad(method.old_loss(method.outputs(old.x), old.labels), [weights])
    assert not torch.equal(projected(plain, reference), plain)  # they are at odds here
    new.generator.set_state(state)
    method.after_backward()
    assert torch.allclose(weights.grad, projected(plain, reference))


def test_agem_remembers_a_task_only_when_it_is_over():
    method = made("agem", buffer=20)
    trainer = Trainer(method, 0, TrainSettings(10))
    for index in range(2):
        trainer.learn(task(index))
    assert int(method.memory.added) == 80
    assert set((method.memory.labels[:20] // 3).tolist()) == {0, 1}


def replaying(name, **changes):
    """A method in its second task, a new batch, and the old examples that a step with it draws first."""
    method = made(name, buffer=40, module=normed(9), **changes)  # old examples have statistics of their own batch
    next(iter(method.phases(task(0))))
    first = examples(seed=0)
    method.loss(batch_of(first))  # the memory has room for all of them, in their order
    method.tasks = ["task1"]
    with torch.no_grad():
        method.network.weights += 0.1
    return method, batch_of(examples(seed=1)), first


def drawn(batch, times=1):
    return [(torch.rand(40, dtype=torch.float64, generator=batch.generator) * 40).long() for _ in range(times)]


def test_er_learns_new_and_old_examples_alike():
    method, new, first = replaying("er")
    state = new.generator.get_state()
    loss = method.loss(new)
    new.generator.set_state(state)
    (index,) = drawn(new)
    now = method.outputs(first.batch(index)[0])
    expected = method.new_loss(new) + nn.functional.cross_entropy(now[:, :3], first.labels[index])
    assert torch.allclose(loss, expected)


def test_derpp_learns_the_labels_of_other_old_examples_too():
    method, new, first = replaying("der++", head="masked-test", alpha=0.7, beta=0.4)
    stored, state = method.memory.targets[:40].clone(), new.generator.get_state()
    loss = method.loss(new)
    new.generator.set_state(state)
    labelled, held = drawn(new, 2)
    outputs = [method.outputs(first.batch(index)[0]) for index in (labelled, held)]
    expected = method.new_loss(new) + 0.4 * nn.functional.cross_entropy(outputs[0], first.labels[labelled])
    expected = expected + 0.7 * (outputs[1] - stored[held]).square().mean()
    assert torch.allclose(loss, expected)


@pytest.mark.parametrize("head", ["task", "masked-test"])
def test_icarls_loss_is_binary_with_old_answers_for_old_classes(head):
    """Old answers are those of the weights and norm statistics of then, which move on with the new task."""
    method = made("icarl", head=head, buffer=18, module=normed(9))
    Trainer(method, 0, TrainSettings(10)).learn(task(0))
    weights, statistics = method.network.weights.detach().clone(), statistics_of(method)
    with torch.no_grad():
        method.network.weights += 0.3 * torch.randn(len(weights), generator=torch.Generator().manual_seed(0))
    x, y = examples(seed=1).batch(torch.arange(40))
    method.binary(x, y + 3)  # moves the statistics
    before = by_hand(method, weights, statistics, x).sigmoid()
    now = by_hand(method, method.network.weights, None, x).sigmoid()
    total, count = 0.0, 0
    for row in range(40):
        for output in range(9):
            if head == "task" and output >= 6:
                continue  # a task to come
            wanted = float(before[row, output]) if output < 3 else float(output == 3 + int(y[row]))
            answer = float(now[row, output])
            total -= wanted * math.log(answer) + (1 - wanted) * math.log(1 - answer)
            count += 1
    assert method.binary(x, y + 3).item() == pytest.approx(total / count, rel=1e-4)


def test_der_holds_the_outputs_it_stored():
    method = made("der", head="masked-test", buffer=40, alpha=0.7, module=normed(9))
    first = examples(seed=0)
    next(iter(method.phases(task(0))))
    method.loss(batch_of(first))
    stored = method.outputs(first.batch(torch.arange(40))[0]).detach()
    assert torch.equal(method.memory.targets[:40], stored)  # the memory has room for all of them, in their order

    method.tasks = ["task1"]
    with torch.no_grad():
        method.network.weights += 0.1
    new = batch_of(examples(seed=1))
    state = new.generator.get_state()
    loss = method.loss(new)
    new.generator.set_state(state)
    index = (torch.rand(40, dtype=torch.float64, generator=new.generator) * 40).long()  # what the step has drawn
    now = method.outputs(first.batch(index)[0])
    expected = method.new_loss(new) + 0.7 * (now - stored[index]).square().mean()
    assert torch.allclose(loss, expected)


def test_ders_distance_is_the_mean_square_over_the_outputs_that_are_trained():
    for head in ("task", "masked-test"):
        method = made("der", head=head)
        draw = torch.Generator().manual_seed(0)
        outputs, targets = (torch.randn(5, 9, generator=draw) for _ in range(2))
        labels = torch.tensor([0, 4, 8, 5, 2])
        own = [range(9) if head == "masked-test" else range(3 * (int(y) // 3), 3 * (int(y) // 3) + 3) for y in labels]
        expected = torch.stack([(outputs[i, o] - targets[i, o]) ** 2 for i in range(5) for o in own[i]]).mean()
        found = method.distance(outputs, SimpleNamespace(labels=labels, targets=targets))
        assert torch.allclose(found, expected)


def away(rows, taken):
    """The squared distance between the mean of the rows taken and the mean of all, in plain numbers."""
    means = [
        [sum(column) / len(some) for column in zip(*some, strict=True)] for some in (rows, [rows[i] for i in taken])
    ]
    return sum((one - other) ** 2 for one, other in zip(*means, strict=True))


def herded(features, count):
    """The paper's algorithm 4, example by example."""
    rows, order = features.double().tolist(), []
    for _ in range(min(count, len(rows))):
        order.append(min(set(range(len(rows))) - set(order), key=lambda row: away(rows, [*order, row])))
    return order


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.integers(1, 14))
def test_herding_takes_what_brings_the_mean_of_those_taken_nearest(seed, rows, size, count):
    features = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    order, numbers = herd(features, count).tolist(), features.double().tolist()
    assert len(set(order)) == len(order) == min(count, rows)
    for number in range(len(order)):  # of two that are as good either may be taken
        best = min(away(numbers, [*order[:number], row]) for row in set(range(rows)) - set(order[:number]))
        assert away(numbers, order[: number + 1]) == pytest.approx(best, abs=1e-5)


def test_herding_is_not_the_order_of_the_nearest_to_the_mean():
    features = torch.tensor([[1.0], [1.1], [-1.2], [-0.9]])  # mean 0; behind -0.9 and 1.0, 1.1 is nearer than -1.2
    assert herd(features, 3).tolist() == [3, 0, 2]


def test_icarl_answers_with_the_nearest_mean():
    module = nn.Sequential(nn.Identity(), nn.Linear(2, 4, bias=False))
    method = made("icarl", classes=(2, 2), module=module, buffer=4)
    method.tasks = ["task1", "task2"]
    method.means = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    x = torch.tensor([[3.0, 1.0], [1.0, 5.0], [-2.0, 1.0], [0.5, -0.1]])
    assert method.logits(x, "task1").argmax(1).tolist() == [0, 1, 1, 0]
    assert method.logits(x, "task2").argmax(1).tolist() == [1, 0, 0, 1]


def test_icarl_shares_its_memory_among_all_classes():
    method = made("icarl", buffer=20)
    for index in range(3):
        Trainer(method, 0, TrainSettings(10)).learn(task(index))
        each = 20 // (3 * (index + 1))
        assert method.positions.bincount().tolist() == [each] * 3 * (index + 1)
        assert len(method.exemplars) == len(method.positions)


def test_icarl_keeps_the_first_of_the_herding_order_and_the_means_of_what_it_keeps():
    method = made("icarl", buffer=20)
    trainer = Trainer(method, 0, TrainSettings(10))

    def features(examples):  # of the layer before the head, by hand
        w = {name: tensor.detach() for name, tensor in method.network.layout.tensors(method.network.weights).items()}
        hidden = (examples @ w["0.weight"].T + w["0.bias"]).clamp(min=0)
        return hidden / hidden.norm(dim=1, keepdim=True)

    trainer.learn(task(0))
    first, positions = method.exemplars.clone(), method.positions.clone()
    x, y = task(0).train.batch(torch.arange(40))
    for label in range(3):  # those of a class are in the order in which they were herded
        assert torch.equal(first[positions == label], x[y == label][herded(features(x[y == label]), 6)])
    trainer.learn(task(1))
    for label in range(3):
        kept = first[positions == label][:3]
        assert torch.equal(method.exemplars[method.positions == label], kept)
        mean = features(kept).mean(0)  # under the network as it is now
        assert torch.allclose(method.means[label], mean / mean.norm(), atol=1e-6)


@pytest.mark.parametrize("head", ["task", "masked-test", "shared"])
@pytest.mark.parametrize("name", ["er", "der", "der++", "agem"])
def test_nothing_is_replayed_while_the_first_task_is_learned(name, head):
    """The memory fills from the first batch on, but with nothing of an earlier task."""
    method = made(name, head=head, buffer=40)
    next(iter(method.phases(task(0))))
    data = examples(seed=0)
    for seed in range(3):  # no example of class 0, which an empty memory would seem to hold
        new = batch_of(data, data.labels.nonzero().view(-1)[:20], seed)
        method.network.weights.grad = None
        loss = method.loss(new)
        outputs = method.outputs(new.x)
        seen = outputs if head == "masked-test" else outputs[:, :3]
        expected = nn.functional.cross_entropy(seen, new.y)
        assert torch.allclose(loss, expected)
        (plain,) = torch.autograd.grad(expected, [method.network.weights])
        loss.backward()
        method.after_backward()
        assert torch.allclose(method.network.weights.grad, plain, atol=1e-6)
        with torch.no_grad():  # a step: from now on there is a distance to what was answered before
            method.network.weights += 0.1
