"""Hard attention to the task: its rules against oracles written out, and what later tasks may not touch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.methods.gated import batch_of, begun, digits, examples, made, task

from exssnet.methods.gates.hat import attention
from exssnet.train import Trainer, TrainSettings
from exssnet.train.steps import batch_sizes

HAT_TOLERANCE = 0.05  # earlier logits of an MLP, in standard deviations of those logits; measured: at most 0.013
HAT_TOLERANCE_RESIDUAL = 0.5  # of a ResNet, with more attention left undecided; measured: at most 0.30


def test_a_step_is_scaled_by_one_minus_the_smaller_attention_of_a_weights_two_ends():
    used = torch.tensor([0.0, 1.0, 0.3, 1.0, 0.6, 1.0, 0.2, 0.0, 0.9])  # 5 and 4 units
    method = begun("hat", used)
    before = method.network.layout.tensors(method.network.weights.detach().clone())
    method.loss(batch_of(examples())).backward()
    slope = method.network.layout.tensors(method.network.weights.grad)
    torch.optim.SGD([method.network.weights], 0.1).step()
    method.hold()
    after = method.network.layout.tensors(method.network.weights.detach())

    def check(name, index, freedom):
        expected = before[name][index] - 0.1 * freedom * slope[name][index]
        assert after[name][index].item() == pytest.approx(expected.item(), abs=1e-6)
        assert freedom > 0 or after[name][index] == before[name][index]

    first, second = used[:5].tolist(), used[5:].tolist()
    for i in range(5):
        check("0.layer.bias", (i,), 1 - first[i])
        for pixel in range(6):
            check("0.layer.weight", (i, pixel), 1 - first[i])
    for j in range(4):
        check("2.layer.bias", (j,), 1 - second[j])
        for i in range(5):
            check("2.layer.weight", (j, i), 1 - min(second[j], first[i]))
        for row in range(9):
            check("4.weight", (row, j), 1)
    again = method.network.weights.detach().clone()
    method.hold()
    assert torch.equal(method.network.weights, again)


def test_the_price_of_attention_is_its_share_among_units_that_no_task_uses():
    used = torch.tensor([0.0, 1.0, 0.3, 1.0, 0.6, 1.0, 0.2, 0.0, 0.9])
    cheap, dear = (begun("hat", used, strength=strength) for strength in (1.0, 3.0))
    batches = [batch_of(examples()) for _ in range(2)]
    difference = dear.loss(batches[1]) - cheap.loss(batches[0])
    a = [1 / (1 + torch.exp(-400 * e)).item() for e in dear.gates.detach().double()]  # one batch an epoch: s_max
    share = sum(x * (1 - u) for x, u in zip(a, used.tolist(), strict=True)) / sum(1 - u for u in used.tolist())
    assert difference.item() == pytest.approx(2 * share, abs=1e-5)


@given(st.integers(2, 300), st.integers(1, 70))
def test_attention_gets_steeper_from_the_first_batch_of_each_epoch_to_its_last(count, size):
    method = made("hat", s_max=50.0)
    data = examples(count)
    for _ in range(2):
        s = [method.steepness(batch_of(data, n)).item() for n in batch_sizes(count, size)]
        assert s == sorted(s)
        assert s[-1] == pytest.approx(50)
        assert len(s) == 1 or s[0] == pytest.approx(1 / 50)


def test_the_gradient_of_an_embedding_is_compensated_as_in_the_paper():
    weigh = torch.randn(25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for s in (1 / 400, 0.5, 5.0, 400.0):
        bound = min(6, 10 / s)  # beyond it the paper's product of a tiny and a huge number loses its digits
        e = torch.linspace(-bound, bound, 25, dtype=torch.float64, requires_grad=True)
        a = torch.sigmoid(s * e)
        (plain,) = torch.autograd.grad((weigh * a).sum(), e)
        expected = 400 / s * (torch.cosh(s * e) + 1) / (torch.cosh(e) + 1) * plain
        ours = attention(e, torch.tensor(s), 400.0)
        assert torch.allclose(ours, a, rtol=1e-6)
        (found,) = torch.autograd.grad((weigh * ours).sum(), e)
        assert torch.allclose(found, expected.detach(), rtol=1e-6)


@pytest.mark.parametrize(
    ("network", "tolerance"),
    [({}, HAT_TOLERANCE), ({"network": "resnet18", "width": 4.0, "epochs": 6}, HAT_TOLERANCE_RESIDUAL)],
)
def test_attention_holds_earlier_tasks_to_the_stated_tolerance(network, tolerance):
    stream, method = digits("hat", **network)
    trainer = Trainer(method, 0, TrainSettings(optimizer="adamw", weight_decay=0.1))
    before, shown, held = {}, {}, None
    for index in range(3):
        earlier = method.network.weights.detach().clone()
        trainer.learn(stream[index])
        if held is not None:  # weights between units that are used in full
            assert held.any()
            assert torch.equal(earlier[held], method.network.weights[held])
        held = method.freedom(method.used, settled=True) == 0
        shown[index] = stream[index].test.batch(torch.arange(80))[0]
        before[index] = method.logits(shown[index], f"task{index + 1}")
    for index in range(2):
        moved = (method.logits(shown[index], f"task{index + 1}") - before[index]).abs().max()
        assert moved < tolerance * before[index].std()


def test_embeddings_stay_in_their_bounds():
    method = made("hat", gate_rate=1000.0)
    Trainer(method, 0).learn(task())
    assert method.private["task1/gates"].abs().max() == 6
