import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from exssnet.data import Data, as_data, as_inputs, from_tensors, split
from exssnet.errors import InputError

X = torch.arange(24, dtype=torch.float32).view(6, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def everything(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    return data.batch(torch.arange(len(data)))


class Pairs(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return X[row].numpy(), int(Y[row])


class Endless(IterableDataset):
    def __iter__(self):
        yield X[0], 0


class Ragged(Pairs):
    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return X[row, : row % 2 + 1].numpy(), int(Y[row])


class Named(Pairs):
    def __getitem__(self, row: int) -> dict[str, int]:
        return {"image": 0, "label": 1, "id": 2}


@pytest.mark.parametrize(
    "examples",
    [
        (X, Y),
        [X, Y.to(torch.int32)],
        (X.numpy(), Y.numpy()),
        (X.double().numpy(), Y.numpy().astype(np.uint8)),
        (X.numpy().astype(">f4"), Y.numpy().astype(">i8")),
        (X.half(), Y),
        TensorDataset(X, Y),
        Pairs(),
        DataLoader(TensorDataset(X, Y), batch_size=4),
    ],
)
def test_every_form_of_the_same_examples_gives_the_same_data(examples):
    data = as_data(examples)
    x, y = everything(data)
    assert torch.equal(x, X)
    assert x.dtype == torch.float32
    assert torch.equal(y, Y)
    assert y.dtype == torch.int64
    assert (data.classes, data.shape, len(data)) == (3, (4,), 6)


def test_bytes_are_scaled_to_one():
    x = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    assert everything(as_data((x, torch.tensor([0, 1]))))[0].tolist() == pytest.approx(np.array([[0, 1], [0.2, 0.4]]))


def test_int64_inputs_stay_indices():
    x, _ = everything(as_data((X.long(), Y)))
    assert torch.equal(x, X.long())
    assert x.dtype == torch.int64


def test_data_is_passed_through():
    data = as_data((X, Y))
    assert as_data(data) is data


def test_a_test_part_may_lack_classes_that_the_task_has():
    assert as_data((X[:2], torch.tensor([1, 1])), classes=3).classes == 3


def test_a_readonly_array_is_taken_without_a_warning():
    x = X.numpy().copy()
    x.flags.writeable = False
    assert torch.equal(everything(as_data((x, Y)))[0], X)


BAD = X.clone()
BAD[3, 1] = float("nan")
INFINITE = X.clone()
INFINITE[4, 0] = float("inf")


@pytest.mark.parametrize(
    ("examples", "classes", "message"),
    [
        ((X, Y[:4]), None, "6 inputs but 4 labels"),
        ((X, Y.float()), None, "give integers"),
        ((X, Y.view(-1, 1)), None, r"labels have shape \[6, 1\]"),
        ((X, torch.zeros(6, dtype=torch.int64)), None, "a task needs at least two classes"),
        ((X, Y), 1, "a task needs at least two classes"),
        ((X, Y), 2, "label 2 of example 2 is not in 0 to 1"),
        ((X, Y - 1), None, "label -1 of example 0"),
        ((BAD, Y), None, "input 3 has NaN or infinity"),
        ((INFINITE, Y), None, "input 4 has NaN or infinity"),
        ((X[:0], Y[:0]), None, "at least one example"),
        ((X[:, 0], Y), None, "at least one example"),
        ((X.int(), Y), None, "inputs are torch.int32"),
        ((np.array(["a", "b"]), Y), None, "inputs are a array of <U1"),
        ((X.tolist(), Y), None, "inputs are a list"),
        (X, None, "examples are a Tensor"),
        ((X, Y, Y), None, "give a pair"),
        (Endless(), None, "map-style"),
        (Ragged(), None, "example 1 has shape"),
        (Named(), None, "example 0 of Named is not a pair"),
        (TensorDataset(X[:0], Y[:0]), None, "is empty"),
    ],
)
def test_examples_that_cannot_be_learned_from_are_refused_with_the_reason(examples, classes, message):
    with pytest.raises(InputError, match=message):
        as_data(examples, classes)


def test_a_data_set_in_memory_becomes_a_stream():
    dataset = from_tensors("own", (X, torch.arange(6) % 4), (X, torch.arange(6) % 4), ["a", "b", "c", "d"])
    stream = split(dataset, 2)
    assert stream.name == "split-own"
    assert torch.equal(everything(stream[1].train)[0], X[[2, 3]])


def test_train_and_test_must_have_the_same_shape():
    with pytest.raises(InputError, match="test inputs"):
        from_tensors("own", (X, Y), (X[:, :2], Y))


def test_a_loaders_own_sampler_and_collate_function_decide_what_is_read():
    part = DataLoader(TensorDataset(X, Y), batch_size=2, sampler=SubsetRandomSampler([0, 2, 3, 5]))
    data = as_data(part, classes=int(Y.max()) + 1)
    assert sorted(everything(data)[0][:, 0].tolist()) == sorted(X[[0, 2, 3, 5], 0].tolist())

    def doubled(rows):
        return 2 * torch.stack([x for x, _ in rows]), [1, 0][: len(rows)]

    loader = DataLoader(TensorDataset(X, Y), collate_fn=doubled, batch_size=2)
    assert torch.equal(everything(as_data(loader))[0], 2 * X)


def test_tokens_stay_whole_numbers_and_inputs_are_checked_alike():
    tokens = torch.arange(12).view(6, 2)
    assert everything(as_data((tokens, Y)))[0].dtype == torch.int64
    assert torch.equal(as_inputs(torch.full((2, 3), 255, dtype=torch.uint8)), torch.ones(2, 3))
    with pytest.raises(InputError, match="NaN or infinity"):
        as_inputs(X / 0)
