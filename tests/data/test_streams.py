import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exssnet.data import Data, from_tensors, permuted, rotated, split
from exssnet.data.streams import Holdout
from exssnet.errors import DataError, InputError


def marked(counts: list[int], test_counts: list[int] | None = None):
    """A data set whose input is its own row number, so that every example can be followed."""

    def part(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
        return torch.arange(float(len(labels))).view(-1, 1, 1, 1), labels

    return from_tensors("marked", part(counts), part(test_counts or counts))


def rows(data: Data) -> list[int]:
    x, _ = data.batch(torch.arange(len(data)))
    return x.flatten().long().tolist()


classes_and_tasks = st.integers(1, 5).flatmap(
    lambda tasks: st.tuples(st.just(tasks), st.lists(st.integers(2, 12), min_size=2 * tasks, max_size=14))
)


@given(classes_and_tasks, st.floats(0, 0.9), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_split_covers_every_example_of_every_class_once(shape, validation, random):
    tasks, counts = shape
    dataset = marked(counts)
    order = random.sample(range(len(counts)), len(counts))
    stream = split(dataset, tasks, order, validation=validation)
    assert [label for group in stream.class_order for label in group] == order
    sizes = [len(group) for group in stream.class_order]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert stream.max_classes == max(sizes)

    seen_train, seen_test = [], []
    for task in stream:
        parts = [task.train, task.test] + ([task.validation] if task.validation else [])
        for data in parts:
            local, own = data.labels, torch.tensor(task.classes)
            source = dataset.test if data is task.test else dataset.train
            assert torch.equal(own[local], source.labels[rows(data)])
        seen_test += rows(task.test)
        seen_train += rows(task.train) + (rows(task.validation) if task.validation else [])
    assert sorted(seen_train) == list(range(sum(counts)))
    assert sorted(seen_test) == list(range(sum(counts)))


def test_validation_is_the_asked_fraction_of_every_class():
    task = split(marked([20, 40, 60, 80]), 2, validation=0.1)[1]
    assert task.validation is not None
    assert torch.bincount(task.validation.labels).tolist() == [6, 8]
    assert torch.bincount(task.train.labels).tolist() == [54, 72]


def test_validation_and_train_share_no_example_even_in_a_miniature():
    for samples in (None, 3, 1000):
        task = split(marked([20] * 4), 2, validation=0.25, samples_per_class=samples)[0]
        assert task.validation is not None
        assert not set(rows(task.train)) & set(rows(task.validation))


def test_validation_is_the_same_for_the_same_seed_and_another_for_another():
    def drawn(seed: int) -> list[int]:
        found = split(marked([40] * 4), 2, validation=0.2, validation_seed=seed)[0].validation
        assert found is not None
        return rows(found)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_class_keeps_its_validation_whatever_the_order_and_number_of_tasks():
    def held(stream) -> set[int]:
        return {row for task in stream for row in rows(task.validation)}

    dataset = marked([30] * 6)
    assert held(split(dataset, 3, validation=0.2)) == held(split(dataset, 2, [5, 3, 1, 0, 2, 4], validation=0.2))


def test_classes_of_one_size_do_not_hold_out_the_same_positions():
    held = {tuple(Holdout(0.3).cut(torch.arange(50), label)[1].tolist()) for label in range(5)}
    assert len(held) == 5


def test_a_miniature_thins_train_evenly_and_leaves_test_whole():
    whole, small = (split(marked([30] * 6), 3, samples_per_class=n)[1] for n in (None, 5))
    assert torch.bincount(small.train.labels).tolist() == [5, 5]
    assert rows(small.test) == rows(whole.test)
    assert set(rows(small.train)) < set(rows(whole.train))


def test_permutations_differ_by_task_and_seed_and_repeat_for_the_same_ones(digits):
    def first(seed: int, task: int) -> torch.Tensor:
        return permuted(digits, 3, seed)[task].test.batch(torch.arange(20))[0]

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))
    assert not torch.equal(first(0, 0), split(digits, 1)[0].test.batch(torch.arange(20))[0])


def test_every_permuted_task_holds_the_same_pixels_and_all_classes(digits):
    plain = split(digits, 1)[0].train
    for task in permuted(digits, 2, seed=0):
        x, y = task.train.batch(torch.arange(len(task.train)))
        assert torch.equal(
            x.flatten(1).sort().values, plain.batch(torch.arange(len(plain)))[0].flatten(1).sort().values
        )
        assert torch.equal(y, plain.labels)
        assert task.classes == tuple(range(10))


def test_train_and_test_of_a_task_are_warped_alike():
    x = torch.arange(16.0).view(1, 1, 4, 4).repeat(4, 1, 1, 1)
    pair = (x, torch.tensor([0, 1, 0, 1]))
    for stream in (permuted(from_tensors("same", pair, pair), 2, 0), rotated(from_tensors("same", pair, pair), 2)):
        task = stream[1]
        assert torch.equal(task.train.batch(torch.arange(4))[0], task.test.batch(torch.arange(4))[0])


def test_rotated_tasks_turn_evenly_over_half_a_turn(digits):
    stream = rotated(digits, 2)
    plain = stream[0].test.batch(torch.arange(9))[0]
    quarter = stream[1].test.batch(torch.arange(9))[0]
    torch.testing.assert_close(quarter, torch.rot90(plain, 1, (-2, -1)), atol=1e-3, rtol=0)


def test_a_stream_says_what_it_is_made_of(digits):
    stream = split(digits, 3)
    assert (stream.name, len(stream), stream.input_shape) == ("split-digits", 3, (1, 8, 8))
    assert stream.class_order == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert stream.data_digests == {"train": digits.train.digest, "test": digits.test.digest}
    assert [task.index for task in stream[1:]] == [1, 2]
    assert stream[-1].classes == (7, 8, 9)


def test_a_stream_survives_being_sent_to_another_process(digits):
    for stream in (split(digits, 2), permuted(digits, 2, seed=0), rotated(digits, 2)):
        sent = pickle.loads(pickle.dumps(stream))
        ours, theirs = (s[1].train.batch(torch.arange(5))[0] for s in (stream, sent))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: split(d, 3), "at most 2 tasks"),
        (lambda d: split(d, 0), "at least 1"),
        (lambda d: permuted(d, 0, seed=0), "at least 1"),
        (lambda d: split(d, 1, [0, 4]), "class order has 4"),
        (lambda d: split(d, 1, [0, 1, 0]), "0 more than once"),
        (lambda d: split(d, 1, validation=1.0), "validation is 1.0"),
        (lambda d: split(d, 1, validation=-0.1), "validation is -0.1"),
        (lambda d: split(d, 1, samples_per_class=0), "samples_per_class is 0"),
    ],
)
def test_a_stream_that_cannot_be_made_says_why(make, message):
    with pytest.raises(InputError, match=message):
        make(marked([4, 4, 4, 4]))


def test_vectors_cannot_be_rotated():
    pair = (np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="cannot rotate"):
        rotated(from_tensors("vectors", pair, pair), 2)


def test_a_task_without_test_examples_is_refused():
    stream = split(marked([4, 4, 4, 4], [4, 4, 0, 0]), 2)
    with pytest.raises(DataError, match="test split of task 1"):
        stream[1]
