"""Accuracy over whole splits: every example once, as it is stored, in batches that suit the device."""

import pytest
import torch

from exssnet.core.engine import at_once
from exssnet.data.tensors import Shared, TensorData, TensorSplit
from exssnet.data.transforms import HorizontalFlip, Normalize, RandomCrop
from exssnet.train.evaluate import accuracy


@pytest.mark.parametrize("shape", [(3, 32, 32), (4,)])
@pytest.mark.parametrize("count", [1, 128, 129, 501])
def test_every_example_counts_once_however_it_is_cut(shape, count):
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(0, 3, (count,), generator=draw)
    inputs = torch.rand(count, *shape, generator=draw)
    inputs.view(count, -1)[:, 3] = torch.arange(count)  # its number
    rows = torch.randperm(count, generator=draw).tolist()
    seen, right = [], 0

    def logits(x):
        seen.extend(x.flatten(1)[:, 3].int().tolist())
        return x.flatten(1)[:, :3]

    for row, label in zip(rows, labels.tolist(), strict=True):
        first = inputs[row].flatten()[:3].tolist()
        right += first.index(max(first)) == label
    found = accuracy(logits, TensorData(Shared(inputs), torch.tensor(rows), labels, 3))
    assert found == pytest.approx(100 * right / count)
    assert seen == rows


def test_images_are_shown_as_they_are_stored_without_what_is_done_to_them_in_training():
    """Light is on the left in class 0 and on the right in class 1: mirrored or moved they would be confused."""
    labels = torch.arange(64) % 2
    images = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    images[labels == 0, :, 2, 1], images[labels == 1, :, 2, 6] = 255, 255
    split = TensorSplit(images, labels, (HorizontalFlip(), RandomCrop(4)), Normalize.unit())
    data = split.select(torch.arange(64), labels, 2)
    mixed, _ = data.batch(torch.arange(64), torch.Generator().manual_seed(0))
    assert not torch.equal(mixed, images.float() / 255)
    assert accuracy(lambda x: x[:, 0, 2, [1, 6]], data) == 100


def test_a_cpu_takes_fewer_large_inputs_at_once_and_a_gpu_always_as_many():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    found = [at_once(shape, cpu) for shape in [(), (0,), (1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 224, 224)]]
    assert found == [500, 500, 500, 128, 32, 16]
    assert [at_once(shape, gpu) for shape in [(4,), (3, 32, 32), (3, 224, 224)]] == [500, 500, 500]
    sizes, inputs = [], torch.zeros(130, 3, 32, 32)
    data = TensorData(Shared(inputs), torch.arange(130), torch.zeros(130, dtype=torch.int64), 1)
    accuracy(lambda x: sizes.append(len(x)) or x.flatten(1)[:, :2], data)
    assert sizes == [128, 2]
