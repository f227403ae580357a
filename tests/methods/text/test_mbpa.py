"""MBPA++: what it retrieves, what its local adaptation computes, and that nothing of it stays."""

import pytest
import torch
from tests.parts import need
from torch.nn import functional

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from exssnet.errors import InputError  # noqa: E402

from . import streams  # noqa: E402


@pytest.fixture
def learned(bert):
    """A method that has learned two tasks."""

    def make(**changes):
        tokens, method = streams.made("mbpa++", bert, streams.stream(bert, 12), **changes)
        for task in tokens[:2]:
            streams.learn(method, task)
        return tokens, method

    return make


def rows_of(task, count=5):
    return task.train.batch(torch.arange(len(task.train))[-count:])[0]


def test_a_planted_text_is_its_own_nearest_neighbour(learned):
    tokens, method = learned(neighbours=3)
    for at, task in enumerate(tokens[:2]):
        x = rows_of(task)
        near = method.nearest(x)
        assert near.shape == (5, 3)
        for row, first in enumerate(near[:, 0]):
            same = method.texts(first[None])[0]
            assert torch.equal(same, x[row, : len(same)])
        of_task = torch.arange(48) // 24
        assert (of_task[near[:, 0]] == at).float().mean() >= 0.8  # a text may be in both


def test_keys_are_those_of_the_encoder_as_it_came(bert, learned):
    tokens, method = learned()
    x, _ = tokens[0].train.batch(torch.arange(24))
    plain = bert.model(input_ids=x[..., 0], attention_mask=(x[..., 1] > 0).long()).last_hidden_state[:, 0]
    torch.testing.assert_close(method.kept["0.key"], plain, atol=1e-5, rtol=1e-4)


def by_hand(parameters, start, outputs_of, labels, of):
    """Gradient descent by autograd."""
    for _ in range(of.steps):
        way = sum((p - p0).square().sum() for p, p0 in zip(parameters, start, strict=True))
        loss = functional.cross_entropy(outputs_of(parameters), labels) + of.strength * way
        gradients = torch.autograd.grad(loss, parameters)
        parameters = [
            (p - of.local_lr * g).detach().requires_grad_() for p, g in zip(parameters, gradients, strict=True)
        ]
    return parameters


def test_the_heads_adaptation_is_gradient_descent_on_the_neighbours(learned):
    tokens, method = learned(neighbours=4, steps=7, strength=0.5, local_lr=0.05)
    x = rows_of(tokens[1], 3)
    found, near = method.adapted(x), method.nearest(x)
    network = method.network.eval()
    for row in range(3):
        texts, labels = method.texts(near[row]), method.labels()[near[row]]
        features = network.features(texts).detach()
        start = [network.head.weight.detach(), network.head.bias.detach()]
        w, b = by_hand(
            [p.clone().requires_grad_() for p in start],
            start,
            lambda p, features=features: features @ p[0].T + p[1],
            labels,
            method.settings,
        )
        expected = network.features(x[row : row + 1]) @ w.T + b
        torch.testing.assert_close(found[row], expected[0], atol=1e-4, rtol=1e-4)


def test_the_encoders_adaptation_moves_the_answer(learned):
    tokens, method = learned(adapt="encoder", neighbours=4, steps=3, local_lr=0.05)
    x = rows_of(tokens[0], 2)
    plain = method.network.eval()(x)
    assert not torch.isclose(method.adapted(x), plain, atol=1e-3).all()
    near = method.nearest(x)
    labels = method.labels()[near]
    right = (method.adapted(x).softmax(1)[torch.arange(2), labels[:, 0]]).detach()
    assert (right > plain.softmax(1)[torch.arange(2), labels[:, 0]].detach()).all()  # nearer to what the neighbours say


@pytest.mark.parametrize("adapt", ["head", "encoder"])
def test_after_each_adaptation_the_weights_are_what_they_were(learned, adapt):
    tokens, method = learned(adapt=adapt, neighbours=4, steps=3, local_lr=0.05)
    before = {name: t.clone() for name, t in method.state_dict().items()}
    x = rows_of(tokens[0], 3)
    first = method.adapted(x)
    assert streams.equal(before, dict(method.state_dict()))
    assert torch.equal(first, method.adapted(x))
    torch.testing.assert_close(first.flip(0), method.adapted(x.flip(0)), atol=1e-5, rtol=1e-4)


def test_weights_are_restored_when_an_adaptation_fails(learned, monkeypatch):
    tokens, method = learned(adapt="encoder", steps=2)
    before = {name: t.clone() for name, t in method.state_dict().items()}
    calls = []
    grad = torch.autograd.grad

    def failing(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return grad(*given)

    monkeypatch.setattr(torch.autograd, "grad", failing)
    with pytest.raises(KeyboardInterrupt):
        method.adapted(rows_of(tokens[0], 1))
    assert streams.equal(before, dict(method.state_dict()))


def test_adapting_recovers_what_fine_tuning_forgot(bert):
    """Two tasks with classes of their own: told no task, a plain classifier answers with the new task's."""
    tasks = ((("sport", "food"), (0, 1)), (("space", "food"), (2, 3)))
    share = {}
    for steps in (0, 30):
        tokens, method = streams.made(
            "mbpa++", bert, streams.stream(bert, 24, tasks), steps=steps, local_lr=0.1, neighbours=8
        )
        for task in tokens:
            streams.learn(method, task)
        test = tokens[0].test
        x, y = test.batch(torch.arange(len(test))[test.labels == 0])  # sport is in the first task alone
        share[steps] = float((method.answers(x) == y).float().mean())
    assert share[30] > share[0] + 0.2


def test_one_batch_in_so_many_is_replayed(bert):
    tokens, method = streams.made("mbpa++", bert, streams.stream(bert, 12), every=3)
    streams.learn(method, tokens[0])
    from .test_fine_tune import batch_of, still

    still(method).steps.zero_()
    plain = method.new_loss(batch_of(tokens[1]))
    losses = [method.loss(batch_of(tokens[1])) for _ in range(7)]
    assert [at for at, loss in enumerate(losses, 1) if not torch.equal(loss, plain)] == [3, 6]


def test_what_is_adapted_is_named():
    from exssnet.methods.text.mbpa import MbpaSettings

    with pytest.raises(InputError, match="adapt is 'all': choose one of head, encoder"):
        MbpaSettings(adapt="all")
