"""The memory of examples: what it keeps, what it gives, and how large it is."""

import math

import pytest
import torch
from tests.methods.small import examples, made

from exssnet.errors import InputError
from exssnet.methods.memory import Memory, ReplaySettings


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
