"""Heads, and each update rule without a memory against an oracle that does not share its code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.small import batch_of, by_hand, examples, made, normed, statistics_of, task
from torch import nn

from exssnet.methods.regularize.lwf import distillation
from exssnet.methods.shared.heads import Head
from exssnet.train import Trainer, TrainSettings

# --- heads ----------------------------------------------------------------------------------------------------------


def test_the_heads_give_each_task_its_outputs():
    assert Head("task", [2, 3]).slices == [slice(0, 2), slice(2, 5)]
    assert Head("shared", [2, 3]).slices == [slice(0, 2), slice(0, 3)]
    assert [Head(kind, [2, 3]).size for kind in ("task", "masked-test", "shared")] == [5, 5, 3]
    rivals = Head("task", [2, 3]).rivals()
    assert torch.equal(rivals, torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool())
    assert Head("masked-test", [2, 3]).rivals().all()


@pytest.mark.parametrize("head", ["task", "masked-test", "shared"])
def test_the_loss_of_old_examples_is_the_loss_they_were_trained_with(head):
    method = made("er", head=head)
    method.tasks = ["task1"]  # the second one is being learned
    data = examples(seed=1)
    new = method.new_loss(batch_of(data))
    labels = data.labels + method.own.start
    assert method.old_loss(method.outputs(data.batch(torch.arange(40))[0]), labels) == new
    outputs = method.outputs(data.batch(torch.arange(40))[0])
    seen = outputs if head == "masked-test" else outputs[:, method.own]
    expected = nn.functional.cross_entropy(seen, labels if head == "masked-test" else data.labels)
    assert torch.allclose(new, expected)


# --- rules ----------------------------------------------------------------------------------------------------------


def softened(outputs, temperature):
    """y'ᵢ = yᵢ^(1/T) / Σ yⱼ^(1/T), the paper's equation 3, from probabilities y."""
    y = outputs.softmax(1) ** (1 / temperature)
    return y / y.sum(1, keepdim=True)


@pytest.mark.parametrize("head", ["task", "masked-test", "shared"])
def test_lwf_answers_for_earlier_tasks_as_the_network_did_before_this_one(head):
    """With the weights and the norm statistics of then, which move on while the new task is learned."""
    outputs = {"task": 7, "masked-test": 7, "shared": 3}[head]
    options = {"head": head, "strength": 0.6, "temperature": 3.0, "module": normed(outputs)}
    method = made("lwf", classes=(3, 2, 2), **options)
    trainer = Trainer(method, 0, TrainSettings(10))
    trainer.learn(task(0))
    trainer.learn(task(1, classes=2))
    weights, statistics = method.network.weights.detach().clone(), statistics_of(method)
    next(method.phases(task(2, classes=2)))
    with torch.no_grad():
        method.network.weights += 0.3 * torch.randn(len(weights), generator=torch.Generator().manual_seed(0))
    new = batch_of(examples(classes=2, seed=2))
    method.loss(new)  # moves the statistics
    now, before = by_hand(method, method.network.weights, None, new.x), by_hand(method, weights, statistics, new.x)
    groups = {"task": [(0, 3), (3, 5)], "masked-test": [(0, 5)], "shared": [(0, 3)]}[head]
    held = sum(-(softened(before[:, a:b], 3) * softened(now[:, a:b], 3).log()).sum(1).mean() for a, b in groups)
    seen, labels = {"task": (now[:, 5:], new.y), "masked-test": (now, new.y + 5), "shared": (now[:, :2], new.y)}[head]
    assert torch.allclose(method.loss(new), nn.functional.cross_entropy(seen, labels) + 0.6 * held, rtol=1e-4)


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_ewcs_importance_is_added_up_from_task_to_task(gamma):
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    method = made("ewc-online", gamma=gamma, module=module)
    trainer, expected = Trainer(method, 0, TrainSettings(10)), torch.zeros_like(method.fisher)
    for index in range(3):
        trainer.learn(task(index))
        nn.utils.vector_to_parameters(method.network.weights.detach().clone(), module.parameters())
        own, found = slice(3 * index, 3 * index + 3), torch.zeros_like(expected)
        for x, label in zip(*task(index).train.batch(torch.arange(40)), strict=True):
            loss = nn.functional.cross_entropy(module(x[None])[:, own], label[None])
            found += nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters()))).square() / 40
        expected = gamma * expected + found
        assert torch.allclose(method.fisher, expected, rtol=1e-4, atol=1e-8)
        assert torch.equal(method.anchor, method.network.weights.detach())


@settings(deadline=None, max_examples=30)
@given(st.floats(0.5, 5), st.integers(0, 1000))
def test_lwfs_distillation_is_the_formula(temperature, seed):
    draw = torch.Generator().manual_seed(seed)
    outputs, targets = (torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    total = 0.0
    for row in range(4):  # y'ᵢ = yᵢ^(1/T) / Σ yⱼ^(1/T), the paper's equation 3, from probabilities y
        y, z = targets[row].softmax(0), outputs[row].softmax(0)
        y, z = (p ** (1 / temperature) / (p ** (1 / temperature)).sum() for p in (y, z))
        total -= float((y * z.log()).sum())
    assert float(distillation(outputs, targets, temperature)) == pytest.approx(total / 4)


def test_ewcs_fisher_is_that_of_a_loop_over_single_examples():
    for head in ("task", "masked-test"):
        method = made("ewc-online", head=head, module=None)
        data = examples(12)
        trained = slice(0, 9) if head == "masked-test" else slice(0, 3)
        expected = torch.zeros_like(method.fisher)
        for index in range(12):
            x, y = data.batch(torch.tensor([index]))
            loss = nn.functional.cross_entropy(method.network(x, training=False)[:, trained], y)
            (gradient,) = torch.autograd.grad(loss, [method.network.weights])
            expected += gradient.square() / 12
        assert torch.allclose(method.information(data), expected, rtol=1e-4, atol=1e-9)


def test_ewcs_penalty_pulls_back_in_proportion_to_fisher_and_way():
    method = made("ewc-online", strength=3.0)
    method.tasks = ["task1"]
    draw = torch.Generator().manual_seed(0)
    method.fisher = torch.rand(len(method.fisher), generator=draw)
    method.anchor = torch.randn(len(method.anchor), generator=draw)
    new = batch_of(examples(seed=1))
    weights = method.network.weights
    (with_penalty,) = torch.autograd.grad(method.loss(new), [weights])
    (without,) = torch.autograd.grad(method.new_loss(new), [weights])
    assert torch.allclose(with_penalty - without, 3.0 * method.fisher * (weights - method.anchor).detach(), atol=1e-5)


def on_a_quadratic(method, slopes, steps=4000, rate=0.0002):
    """Small steps on L = ½ a·w², as the loop makes them; what the loss lost in each direction."""
    weights = method.network.weights
    start = weights.detach().clone()
    for _ in range(steps):
        method._walk()  # as the loss does
        weights.grad = (slopes * weights).detach()
        method.after_backward()
        with torch.no_grad():
            weights -= rate * weights.grad
    method._walk()
    return 0.5 * slopes * (start**2 - weights.detach() ** 2)


def test_sis_path_integral_is_what_the_task_s_loss_lost_whatever_the_penalty_did():
    method = made("si", damping=0.001, strength=3.0)
    size = len(method.network.weights)
    lost = on_a_quadratic(method, torch.linspace(0.5, 2, size))
    assert torch.allclose(method.path, lost, rtol=2e-3, atol=1e-7)
    first, start = method.network.weights.detach().clone(), method.network.start
    method.end_task(task(0))
    importance = lost / ((first - start) ** 2 + 0.001)
    assert torch.allclose(method.importance, importance, rtol=2e-3, atol=1e-4)

    with torch.no_grad():  # far from the anchor, so that the penalty pulls
        method.network.weights += torch.randn(size, generator=torch.Generator().manual_seed(0))
    moved = method.network.weights.detach().clone()
    method.last.copy_(moved)
    lost = on_a_quadratic(method, torch.linspace(2, 0.5, size))
    pulled = method.network.weights.detach() - moved * torch.exp(-0.8 * torch.linspace(2, 0.5, size))
    assert pulled.abs().max() > 0.1  # without a penalty a weight goes to w·exp(−a·rate·steps)
    assert torch.allclose(method.path, lost, rtol=5e-3, atol=1e-4)
    method.end_task(task(1))
    last = method.network.weights.detach()
    importance = importance + (lost / ((last - first) ** 2 + 0.001)).clamp(min=0)
    assert torch.allclose(method.importance, importance, rtol=1e-2, atol=1e-2)
    assert torch.equal(method.anchor, last)


def test_a_weight_whose_way_raised_the_loss_is_of_no_importance_to_si():
    method = made("si", damping=0.1)
    weights = method.network.weights
    start, slopes = weights.detach().clone(), torch.ones(len(weights))
    slopes[::2] = -1.0  # half of them are led uphill
    for _ in range(50):
        method._walk()
        weights.grad = weights.detach().clone()
        method.after_backward()
        with torch.no_grad():
            weights -= 0.01 * slopes * weights.grad
    method.end_task(task(0))
    gained = 0.5 * (start**2 - weights.detach() ** 2) / ((weights.detach() - start) ** 2 + 0.1)
    assert (gained < -1e-4).any()
    assert torch.allclose(method.importance, gained.clamp(min=0), rtol=2e-2, atol=1e-5)


def test_si_pulls_back_in_proportion_to_importance_and_way():
    method = made("si", strength=0.5)
    draw = torch.Generator().manual_seed(0)
    method.importance = torch.rand(len(method.importance), generator=draw)
    method.anchor = torch.randn(len(method.anchor), generator=draw)
    weights = method.network.weights
    weights.grad = torch.zeros_like(weights)
    method.after_backward()
    assert torch.allclose(weights.grad, method.importance * (weights.detach() - method.anchor))


@pytest.mark.parametrize("module", [None, normed(3)])
def test_an_individual_network_is_that_of_a_task_learned_alone(module):
    both, alone = (made("individual", head="shared", module=module) for _ in range(2))
    trainer = Trainer(both, 0, TrainSettings(10))
    for index in range(2):
        trainer.learn(task(index))
    Trainer(alone, 0, TrainSettings(10)).learn(task(1))
    x = examples(seed=1).batch(torch.arange(40))[0]
    assert torch.equal(both.logits(x, "task2"), alone.logits(x, "task2"))


def test_multitask_has_every_example_of_every_task_under_its_own_output():
    method = made("multitask", classes=(3, 2))
    tasks = [task(0), task(1, classes=2, count=30)]
    everything = method.together(tasks).train
    x, y = everything.batch(torch.arange(70))
    assert torch.equal(x, torch.cat([t.train.batch(torch.arange(len(t.train)))[0] for t in tasks]))
    assert torch.equal(y, torch.cat([tasks[0].train.labels, tasks[1].train.labels + 3]))


@pytest.mark.parametrize("head", ["task", "masked-test", "shared"])
def test_multitask_trains_and_counts_each_example_among_the_outputs_of_its_task(head):
    method = made("multitask", classes=(3, 2), head=head)
    new = batch_of(method.together([task(0), task(1, classes=2, count=30)]).train)
    loss = method.loss(new)
    outputs = method.outputs(new.x).detach()
    groups = {"task": [(0, 3)] * 40 + [(3, 5)] * 30, "masked-test": [(0, 5)] * 70, "shared": [(0, 3)] * 70}[head]
    losses, answers = [], []
    for row, (a, b) in enumerate(groups):
        losses.append(-outputs[row, a:b].log_softmax(0)[new.y[row] - a])
        answers.append(a + int(outputs[row, a:b].argmax()))
    assert torch.allclose(loss, torch.stack(losses).mean())
    assert new.logits.argmax(1).tolist() == answers
