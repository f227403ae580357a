"""Accuracy over whole splits, in batches that suit the device."""

import pytest
import torch

from exssnet.core.execution import EVALUATED, FEWEST, NEAR, at_once
from exssnet.data.tensors import Shared, TensorData
from exssnet.train.evaluate import accuracy


@pytest.mark.parametrize("shape", [(3, 32, 32), (4,)])
@pytest.mark.parametrize("count", [1, 128, 129, 501])
def test_every_example_counts_once_however_it_is_cut(shape, count):
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(0, 3, (count,), generator=draw)
    data = TensorData(Shared(torch.rand(count, *shape, generator=draw)), torch.arange(count), labels, 3)
    sizes = []

    def logits(x):
        sizes.append(len(x))
        return torch.stack([x.flatten(1)[:, place] for place in range(3)], dim=1)

    wanted = (logits(data.batch(torch.arange(count))[0]).argmax(1) == labels).double().mean()
    sizes.clear()
    assert accuracy(logits, data) == pytest.approx(100 * float(wanted))
    assert sum(sizes) == count
    assert max(sizes) == min(count, at_once(shape, labels.device))


def test_a_cpu_takes_fewer_large_inputs_at_once_and_a_gpu_always_as_many():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    found = [at_once(shape, cpu) for shape in [(), (0,), (1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 224, 224)]]
    assert found == [EVALUATED, EVALUATED, EVALUATED, 128, 32, FEWEST]
    assert NEAR == 128 * 3 * 32 * 32
    assert {at_once(shape, gpu) for shape in [(4,), (3, 32, 32), (3, 224, 224)]} == {EVALUATED}
