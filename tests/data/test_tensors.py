import pytest
import torch

from exssnet.data import Dataset, Shared, TensorData, split
from exssnet.data.dataset import digest_of


def test_tasks_of_one_data_set_share_one_image_tensor(digits):
    stored = {task.train._inputs.data_ptr() for task in split(digits, 5)}
    assert stored == {digits.train.images.data_ptr()}


def test_tasks_on_another_device_share_one_copy_there(digits):
    moved = [task.train.to("meta") for task in split(digits, 5)]
    assert len({id(data._inputs) for data in moved}) == 1
    assert moved[0].device.type == "meta"


def test_a_batch_is_float32_augmented_only_with_a_generator(cifar100: Dataset):
    task = split(cifar100, 10)[0]
    index = torch.arange(0, len(task.train), 50)
    plain, labels = task.train.batch(index)
    again, _ = task.train.batch(index)
    first, same_labels = task.train.batch(index, torch.Generator().manual_seed(1))
    second, _ = task.train.batch(index, torch.Generator().manual_seed(1))
    assert plain.dtype == first.dtype == torch.float32
    assert plain.shape == (len(index), 3, 32, 32)
    assert torch.equal(plain, again)
    assert torch.equal(first, second)
    assert torch.equal(labels, same_labels)
    assert not torch.equal(plain, first)


def test_normalised_cifar_has_zero_mean_and_unit_deviation(cifar100: Dataset):
    data = split(cifar100, 1)[0].train
    x, _ = data.batch(torch.arange(0, len(data), 10))
    assert x.mean((0, 2, 3)).abs().max() < 0.03
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.03


def test_gradients_never_reach_the_stored_data():
    data = TensorData(Shared(torch.zeros(4, 2)), torch.arange(4), torch.tensor([0, 1, 0, 1]), 2)
    x, _ = data.batch(torch.arange(4))
    x += 1
    assert torch.equal(data.batch(torch.arange(4))[0], torch.zeros(4, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_five_tasks_on_a_gpu_hold_one_copy_and_their_batches_can_be_captured(digits):
    before = torch.cuda.memory_allocated()
    tasks = [task.train.to("cuda") for task in split(digits, 5)]
    size = digits.train.images.numel()
    assert size <= torch.cuda.memory_allocated() - before < 2 * size
    index = torch.arange(16, device="cuda")
    expected = tasks[1].batch(index)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = tasks[1].batch(index)
    graph.replay()
    assert torch.equal(captured, expected)


def test_images_in_another_order_of_memory_are_put_in_order():
    images = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3).permute(0, 3, 1, 2)
    shared = Shared(images)
    assert shared.on("cpu").is_contiguous()
    assert torch.equal(shared.on("cpu"), images)


def test_the_digest_of_a_data_set_is_another_for_any_other_input_label_shape_type_or_order():
    inputs, labels = torch.arange(24, dtype=torch.uint8).view(4, 6), torch.tensor([0, 1, 1, 0])
    other_input, other_label = inputs.clone(), labels.clone()
    other_input[3, 5] ^= 1
    other_label[3] = 2
    found = [
        digest_of(inputs, labels),
        digest_of(other_input, labels),
        digest_of(inputs, other_label),
        digest_of(inputs.view(4, 2, 3), labels),
        digest_of(inputs.view(torch.int8), labels),
        digest_of(inputs.flip(0), labels),
        digest_of(inputs, labels.roll(1)),
    ]
    assert digest_of(inputs.clone(), labels.clone()) == found[0]
    assert len(set(found)) == len(found)
