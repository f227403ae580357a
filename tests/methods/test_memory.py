"""The memory of examples: what it keeps, what it gives, and how large it is."""

import math
from dataclasses import replace

import pytest
import torch
from tests.methods.small import batch_of, examples, made, task
from torch import nn

from exssnet.data.tensors import TensorSplit
from exssnet.data.transforms import HorizontalFlip, Normalize
from exssnet.errors import InputError
from exssnet.methods import methods
from exssnet.methods.replay._memory import Memory, ReplaySettings
from exssnet.train import Trainer, TrainSettings


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


@pytest.mark.parametrize(
    ("name", "head"),
    [(name, head) for name in ("er", "agem", "der", "der++", "icarl") for head in methods()[name].heads],
)
def test_examples_of_every_task_are_remembered_under_the_outputs_they_were_trained_on(name, head):
    method = made(name, head=head, buffer=30)
    for index in range(3):
        Trainer(method, 0, TrainSettings(10)).learn(task(index))
    output_of = {}
    for index in range(3):
        for x, y in zip(*task(index).train.batch(torch.arange(40)), strict=True):
            output_of[tuple(x.tolist())] = int(y) + (0 if head == "shared" else 3 * index)
    kept = (
        (method.exemplars, method.positions) if name == "icarl" else (method.memory.x[:-1], method.memory.labels[:-1])
    )
    assert [output_of[tuple(x.tolist())] for x in kept[0]] == kept[1].tolist()
    assert len({output // 3 for output in kept[1].tolist()}) == (1 if head == "shared" else 3)


@pytest.mark.parametrize("name", ["er", "icarl"])
def test_what_is_replayed_is_augmented_as_new_examples_are(name):
    """Images whose left half is light: about half of those that the network sees are mirrored."""
    images = torch.zeros(40, 1, 2, 3, dtype=torch.uint8)
    images[..., 0] = 255
    labels = torch.arange(40) % 3
    data = TensorSplit(images, labels, (HorizontalFlip(),), Normalize.unit()).select(torch.arange(40), labels, 3)
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    method = made(name, buffer=30, module=module)
    first, second = (replace(task(index), train=data, test=data) for index in range(2))
    Trainer(method, 0, TrainSettings(10)).learn(first)
    next(iter(method.phases(second)))
    seen = []
    method.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    new = batch_of(data)
    new.x = torch.zeros(40, 1, 2, 3)
    method.loss(new)
    replayed = torch.cat([x for x in seen if x.any()])
    light = replayed[:, 0, 0].argmax(1)
    assert 0.2 < (light == 0).double().mean() < 0.8
    assert set(light.tolist()) == {0, 2}


def test_a_buffer_is_a_number_or_a_share():
    assert ReplaySettings(buffer=200).capacity(50_000) == 200
    assert ReplaySettings(buffer=0.001).capacity(50_000) == 50
    assert ReplaySettings(buffer=0.001).capacity(10) == 1
    assert ReplaySettings(buffer=1e12).capacity(10) == 10
    with pytest.raises(InputError, match="2 examples for 9 classes: iCaRL needs one for each"):
        made("icarl", buffer=2)
