"""Token states as examples: what a batch holds, and in which order an epoch shows them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exssnet.data.text.by_length import POOL
from exssnet.data.text.states import StatesData
from exssnet.encoders.states import Shard, States
from exssnet.models.text_cnn import TextCNN

WIDTH, MOST = 3, 20


def states_of(lengths: list[int], seed: int = 0) -> tuple[States, list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    texts = [draw.normal(size=(length, WIDTH)).astype(np.float16) for length in lengths]
    half = len(texts) // 2
    shards = [
        Shard(
            np.concatenate([np.zeros((0, WIDTH), np.float16), *part]),
            np.cumsum([len(text) for text in part], dtype=np.int64),
            0,
        )
        for part in (texts[:half], texts[half:])
    ]  # fmt: skip
    return States(shards, WIDTH), texts


def data_of(lengths: list[int]) -> StatesData:
    """The label of a text is its row, so that it can be found again."""
    states, _ = states_of(lengths)
    rows = torch.arange(len(lengths))
    return StatesData(states, rows, rows, max(len(lengths), 2), MOST)


def on_a_device(data: StatesData) -> StatesData:
    """As it is on a GPU, whose memory holds the states end to end."""
    return StatesData(data._states, data._rows, data.labels, data.classes, MOST, data.pack())


lengths_of = st.lists(st.integers(0, MOST), min_size=1, max_size=12)


@given(lengths=lengths_of, data=st.data(), packed=st.booleans())
def test_a_batch_holds_the_texts_that_its_labels_name(lengths, data, packed):
    """Real tokens, then zeros; the last channel counts the tokens."""
    _, texts = states_of(lengths)
    examples = on_a_device(data_of(lengths)) if packed else data_of(lengths)
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6)))
    x, y = examples.batch(index)
    assert x.dtype == torch.float32
    for row, text in zip(x, y.tolist(), strict=True):
        wanted = np.zeros(row.shape, np.float32)
        wanted[: lengths[text], :-1], wanted[: lengths[text], -1] = texts[text], 1
        np.testing.assert_array_equal(row.numpy(), wanted)


@given(lengths=lengths_of)
def test_on_a_device_every_batch_has_one_shape(lengths):
    data = on_a_device(data_of(lengths))
    shapes = {data.batch(torch.tensor([row]))[0].shape for row in range(len(lengths))}
    assert len(shapes) == 1
    assert max(lengths) <= shapes.pop()[1] <= MOST


def test_the_network_sees_no_difference_between_a_cpu_and_a_device():
    data = data_of([1, 4, 9, 20, 7, 0])
    torch.manual_seed(0)
    network = TextCNN((MOST, WIDTH + 1), 5, 4).eval()
    index = torch.tensor([5, 0, 2, 1])
    here, there = network(data.batch(index)[0]), network(on_a_device(data).batch(index)[0])
    torch.testing.assert_close(here, there)


def test_remembered_examples_are_shown_as_they_were():
    data = data_of([3, 20, 1])
    index = torch.tensor([2, 0])
    for one in (data, on_a_device(data)):
        kept = one.examples(index)
        assert kept.dtype == torch.float16
        assert kept.shape == (2, *data.shape)
        x, _ = one.batch(index)
        torch.testing.assert_close(one.shown(kept)[:, : x.shape[1]], x[:, : kept.shape[1]])


@given(
    lengths=st.lists(st.integers(0, MOST), min_size=1, max_size=60),
    batch=st.integers(1, 9),
    seed=st.integers(0, 5),
)
def test_an_epoch_shows_every_example_once_and_follows_from_the_seed(lengths, batch, seed):
    data = data_of(lengths)
    order = data.order(batch, torch.Generator().manual_seed(seed))
    assert order.sort().values.tolist() == list(range(len(lengths)))
    assert order.tolist() == data.order(batch, torch.Generator().manual_seed(seed)).tolist()


def test_batches_are_of_like_lengths_and_come_in_random_order():
    draw = np.random.default_rng(0)
    data = data_of(draw.integers(0, MOST + 1, 1000).tolist())
    orders = [data.order(10, torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    assert orders[0].tolist() != orders[1].tolist()
    for order in orders:
        batches = data.lengths[order].view(100, 10)
        padded = int((batches.max(1).values * 10).sum())
        shuffled = data.lengths[torch.randperm(1000)].view(100, 10)
        assert padded < 1.1 * int(data.lengths.sum()) < 0.7 * int((shuffled.max(1).values * 10).sum())
        means = batches.float().mean(1)
        assert abs(float(torch.corrcoef(torch.stack([means, torch.arange(100.0)]))[0, 1])) < 0.3


def test_what_is_left_over_is_not_always_the_longest():
    data = data_of([1] * 9 + [MOST] * 2)
    last = {int(data.lengths[data.order(5, torch.Generator().manual_seed(seed))[-1]]) for seed in range(30)}
    assert last == {1, MOST}


def test_a_pool_is_shuffled_as_a_whole():
    """Examples of one length meet others in every epoch."""
    data = data_of([5] * (POOL * 4))
    first, second = (data.order(2, torch.Generator().manual_seed(seed)).view(-1, 2) for seed in (0, 1))
    pairs = {tuple(sorted(pair)) for pair in first.tolist()} & {tuple(sorted(pair)) for pair in second.tolist()}
    assert len(pairs) < len(first) / 4


def test_evaluation_in_order_meets_like_lengths():
    assert data_of([9, 1, 5, 3]).lengths.tolist() == [1, 3, 5, 9]


def test_tasks_are_joined_under_new_labels():
    one, two = data_of([3, 8]), data_of([2, 8, 5])
    both = StatesData.joined([one, two], [one.labels, two.labels + 2], 5)
    assert len(both) == 5
    for row in range(5):
        x, y = both.batch(torch.tensor([row]))
        part, label = (one, int(y)) if int(y) < 2 else (two, int(y) - 2)
        wanted, _ = part.batch((part.labels == label).nonzero()[0])
        torch.testing.assert_close(x, wanted)


@pytest.mark.gpu
def test_on_a_gpu_batches_are_what_they_are_on_a_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data = data_of([3, 20, 1, 7])
    there = data.to("cuda")
    index = torch.tensor([3, 0, 2])
    x, y = there.batch(index.cuda())
    here, labels = data.batch(index)
    assert y.tolist() == labels.tolist()
    torch.testing.assert_close(x.cpu()[:, : here.shape[1]], here[:, : x.shape[1]])
