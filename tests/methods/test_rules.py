"""Each update rule against an oracle that does not share its code."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exssnet.data import TensorData
from exssnet.data.task import Outline, Task
from exssnet.data.tensors import Shared
from exssnet.errors import InputError
from exssnet.methods import methods
from exssnet.methods.agem import projected
from exssnet.methods.base import Batch
from exssnet.methods.heads import Head
from exssnet.methods.icarl import herd
from exssnet.methods.lwf import distillation
from exssnet.methods.memory import Memory, ReplaySettings
from exssnet.train import Trainer, TrainSettings


def examples(count=40, classes=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = torch.randn(count, 6, generator=draw) + 2 * nn.functional.one_hot(y + seed % 3, 6)
    return TensorData(Shared(x), torch.arange(count), y, classes)


def task(index=0, classes=3, count=40):
    data = examples(count, classes, seed=index)
    return Task(index, f"task{index + 1}", tuple(range(classes)), data, data)


def made(name, classes=(3, 3, 3), head="task", module=None, **changes):
    """A method on a small network, with all its settings as usual but these."""
    kind = methods()[name]
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, kind.outputs(head, classes)))
    outline = Outline(tuple(classes), 40 * len(classes))
    return kind(module, kind.settings_type(**({"epochs": 2, "lr": 0.01} | changes)), 0, head, outline)


def batch_of(data, index=None, seed=0):
    index = torch.arange(len(data)) if index is None else index
    x, y = data.batch(index)
    return Batch(x, y, data, index, torch.Generator().manual_seed(seed))


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
    assert method.old_loss(method.network.run(data.batch(torch.arange(40))[0], training=True), labels) == new
    outputs = method.network.run(data.batch(torch.arange(40))[0], training=True)
    seen = outputs if head == "masked-test" else outputs[:, method.own]
    expected = nn.functional.cross_entropy(seen, labels if head == "masked-test" else data.labels)
    assert torch.allclose(new, expected)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 50])
def test_a_reservoir_keeps_every_example_with_the_same_probability(batch):
    """Each of 60 examples is in a memory of 12 with probability 1/5: χ² over 3,000 memories, 59 degrees of freedom."""
    runs, examples, capacity = 3000, 60, 12
    kept, draw = torch.zeros(examples), torch.Generator().manual_seed(0)
    for _ in range(runs):
        memory = Memory(capacity, torch.zeros(1, 1, dtype=torch.int64))
        for numbers in torch.split(torch.arange(examples), batch):
            memory.add(numbers[:, None], numbers, draw)
        found = memory.labels[:capacity]
        assert len(set(found.tolist())) == capacity  # nobody twice
        assert torch.equal(memory.x[:capacity, 0], found)
        kept[found] += 1
    expected = runs * capacity / examples
    # counts vary less than independent ones, since each memory keeps exactly 12: a factor of 1 − 1/5
    statistic = float(((kept - expected) ** 2 / (expected * (1 - capacity / examples))).sum())
    assert 59 - 4 * math.sqrt(2 * 59) < statistic < 59 + 4 * math.sqrt(2 * 59)


def test_a_memory_gives_only_what_was_put_in_and_gives_all_of_it():
    draw = torch.Generator().manual_seed(0)
    memory = Memory(10, torch.zeros(1, 6))
    data = examples(4)
    memory.add(data.examples(torch.arange(4)), torch.tensor([5, 6, 7, 8]), draw)
    old = memory.draw(200, data, draw)
    assert set(old.labels.tolist()) == {5, 6, 7, 8}
    assert torch.equal(old.x, data.batch(torch.arange(4))[0][old.labels - 5])


def test_a_buffer_is_a_number_or_a_share():
    assert ReplaySettings(buffer=200).capacity(50_000) == 200
    assert ReplaySettings(buffer=0.001).capacity(50_000) == 50
    assert ReplaySettings(buffer=0.001).capacity(10) == 1
    assert ReplaySettings(buffer=1e12).capacity(10) == 10
    with pytest.raises(InputError, match="2 examples for 9 classes: iCaRL needs one for each"):
        made("icarl", buffer=2)


# --- rules ----------------------------------------------------------------------------------------------------------


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
    method = made("agem", head="shared", buffer=20)
    Trainer(method, 0, TrainSettings(10)).learn(task(0))
    new, weights = batch_of(examples(seed=0)), method.network.weights
    new.y = (new.y + 1) % 3  # the same examples, and other answers
    weights.grad = None
    method.loss(new).backward()
    plain, state = weights.grad.clone(), new.generator.get_state()
    old = method.memory.draw(len(new), new.data, new.generator)
    (reference,) = torch.autograd.grad(method.old_loss(method.network.run(old.x, training=True), old.labels), [weights])
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
    method = made(name, buffer=40, **changes)
    next(iter(method.phases(task(0))))
    first = examples(seed=0)
    method.loss(batch_of(first))  # the memory has place for all of them, in their order
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
    (place,) = drawn(new)
    now = method.network.run(first.batch(place)[0], training=True)
    expected = method.new_loss(new) + nn.functional.cross_entropy(now[:, :3], first.labels[place])
    assert torch.allclose(loss, expected)


def test_derpp_learns_the_labels_of_other_old_examples_too():
    method, new, first = replaying("der++", head="masked-test", alpha=0.7, beta=0.4)
    stored, state = method.memory.targets[:40].clone(), new.generator.get_state()
    loss = method.loss(new)
    new.generator.set_state(state)
    labelled, held = drawn(new, 2)
    outputs = [method.network.run(first.batch(place)[0], training=True) for place in (labelled, held)]
    expected = method.new_loss(new) + 0.4 * nn.functional.cross_entropy(outputs[0], first.labels[labelled])
    expected = expected + 0.7 * (outputs[1] - stored[held]).square().mean()
    assert torch.allclose(loss, expected)


@pytest.mark.parametrize("head", ["task", "masked-test", "shared"])
def test_lwf_holds_the_outputs_of_earlier_tasks_on_the_new_examples(head):
    method = made("lwf", classes=(3, 2, 2), head=head, strength=0.6, temperature=3.0)
    method.tasks = ["task1", "task2"]
    draw = torch.Generator().manual_seed(0)
    method.teacher = method.network.weights.detach() + 0.3 * torch.randn(len(method.teacher), generator=draw)
    new = batch_of(examples(classes=2, seed=1))
    before = method.network.run(new.x, training=False, weights=method.teacher)
    now = method.network.run(new.x, training=True)
    groups = {"task": [(0, 3), (3, 5)], "masked-test": [(0, 5)], "shared": [(0, 3)]}[head]
    held = sum(distillation(now[:, a:b], before[:, a:b], 3.0) for a, b in groups)
    assert torch.allclose(method.loss(new), method.new_loss(new) + 0.6 * held)


def test_ewcs_importance_is_added_up_from_task_to_task():
    method = made("ewc-online", gamma=0.5)
    method.fisher = torch.ones_like(method.fisher)
    new = task(0)
    expected = 0.5 + method.information(new.train)
    method.end_task(new)
    assert torch.allclose(method.fisher, expected)
    assert torch.equal(method.anchor, method.network.weights.detach())


@pytest.mark.parametrize("head", ["task", "masked-test"])
def test_icarls_loss_is_binary_with_old_answers_for_old_classes(head):
    method = made("icarl", head=head, buffer=18)
    method.tasks = ["task1"]
    draw = torch.Generator().manual_seed(0)
    method.teacher = method.network.weights.detach() + 0.3 * torch.randn(len(method.teacher), generator=draw)
    x, y = examples(seed=1).batch(torch.arange(40))
    before = method.network.run(x, training=False, weights=method.teacher).sigmoid()
    now = method.network.run(x, training=True).sigmoid().detach()
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
    method = made("der", head="masked-test", buffer=40, alpha=0.7)
    first = examples(seed=0)
    next(iter(method.phases(task(0))))
    method.loss(batch_of(first))
    stored = method.network.run(first.batch(torch.arange(40))[0], training=True).detach()
    assert torch.equal(method.memory.targets[:40], stored)  # the memory has place for all of them, in their order

    method.tasks = ["task1"]
    with torch.no_grad():
        method.network.weights += 0.1
    new = batch_of(examples(seed=1))
    state = new.generator.get_state()
    loss = method.loss(new)
    new.generator.set_state(state)
    place = (torch.rand(40, dtype=torch.float64, generator=new.generator) * 40).long()  # what the step has drawn
    now = method.network.run(first.batch(place)[0], training=True)
    expected = method.new_loss(new) + 0.7 * (now - stored[place]).square().mean()
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
            loss = nn.functional.cross_entropy(method.network.run(x, training=False)[:, trained], y)
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


def test_sis_path_integral_on_a_quadratic_is_what_the_loss_lost():
    """On L = ½ a·w² small steps against the slope lose ½ a (w₀² − w₁²) in each direction."""
    method = made("si", damping=0.001)
    weights, slopes = method.network.weights, torch.linspace(0.5, 2, len(method.network.weights))
    start = weights.detach().clone()
    for _ in range(4000):
        method._walk()
        weights.grad = (slopes * weights).detach()
        method.after_backward()
        with torch.no_grad():
            weights -= 0.0002 * weights.grad
    method._walk()
    lost = 0.5 * slopes * (start**2 - weights.detach() ** 2)
    assert torch.allclose(method.path, lost, rtol=2e-3, atol=1e-7)
    method.end_task(task(0))
    assert torch.allclose(method.importance, lost / ((weights.detach() - start) ** 2 + 0.001), rtol=2e-3, atol=1e-4)


def test_si_pulls_back_in_proportion_to_importance_and_way():
    method = made("si", strength=0.5)
    draw = torch.Generator().manual_seed(0)
    method.importance = torch.rand(len(method.importance), generator=draw)
    method.anchor = torch.randn(len(method.anchor), generator=draw)
    weights = method.network.weights
    weights.grad = torch.zeros_like(weights)
    method.after_backward()
    assert torch.allclose(weights.grad, method.importance * (weights.detach() - method.anchor))


def test_herding_takes_what_brings_the_mean_nearest():
    """On a line, mean 2: first 2.5 (nearest to 2), then 1 (mean 1.75), then 3 (mean 2.17)."""
    features = torch.tensor([[0.0], [1.0], [2.5], [3.0], [3.5]])
    assert herd(features, 3).tolist() == [2, 1, 3]
    assert sorted(herd(features, 9).tolist()) == [0, 1, 2, 3, 4]


def test_icarl_answers_with_the_nearest_mean():
    module = nn.Sequential(nn.Identity(), nn.Linear(2, 4, bias=False))
    method = made("icarl", classes=(2, 2), module=module, buffer=4)
    method.tasks = ["task1", "task2"]
    method.means = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    x = torch.tensor([[3.0, 1.0], [1.0, 5.0], [-2.0, 1.0], [0.5, -0.1]])
    assert method.logits(x, "task1").argmax(1).tolist() == [0, 1, 1, 0]
    assert method.logits(x, "task2").argmax(1).tolist() == [1, 0, 0, 1]


def test_icarl_shares_its_places_among_all_classes():
    method = made("icarl", buffer=20)
    for index in range(3):
        Trainer(method, 0, TrainSettings(10)).learn(task(index))
        each = 20 // (3 * (index + 1))
        assert method.places.bincount().tolist() == [each] * 3 * (index + 1)
        assert len(method.exemplars) == len(method.places)


def test_icarl_keeps_the_first_of_the_herding_order_and_the_means_of_what_it_keeps():
    method = made("icarl", buffer=20)
    trainer = Trainer(method, 0, TrainSettings(10))
    trainer.learn(task(0))
    first, places = method.exemplars.clone(), method.places.clone()
    data = task(0).train
    for label in range(3):  # those of a class are in the order in which they were herded
        own = (data.labels == label).nonzero().view(-1)
        features = nn.functional.normalize(method.network.features(data.batch(own)[0]))
        order = own[herd(features, 20 // 3)]
        assert torch.equal(first[places == label], data.examples(order))
        nearest = nn.functional.normalize(features[herd(features, 20 // 3)].mean(0), dim=0)
        assert torch.allclose(method.means[label], nearest, atol=1e-6)
    trainer.learn(task(1))
    for label in range(3):
        assert torch.equal(method.exemplars[method.places == label], first[places == label][: 20 // 6])


def test_an_individual_network_is_that_of_a_task_learned_alone():
    both, alone = made("individual", head="shared"), made("individual", head="shared")
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
