"""The classifier, its losses, and replay, against the formulas by hand."""

import pytest
import torch
from tests.parts import need
from torch.nn import functional

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from exssnet.methods.base import Batch  # noqa: E402

from . import streams  # noqa: E402


@pytest.fixture
def using(bert):
    return bert


def batch_of(task, count=6):
    index = torch.arange(count)
    x, y = task.train.batch(index)
    return Batch(x, y, task.train, index, torch.Generator().manual_seed(0))


def still(method):
    """Without dropout: losses can be computed again."""
    for module in method.network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return method


def test_the_features_are_the_mean_over_each_texts_own_tokens(using):
    tokens, method = streams.made("fine-tune", using, streams.stream(using))
    data = tokens[0].test
    x, _ = data.batch(torch.arange(len(data)))
    found = method.network.eval().features(x)
    for row in range(0, len(x), 5):
        ids = x[row][x[row, :, 1] > 0][None, :, 0]
        alone = using.model(input_ids=ids).last_hidden_state.mean(1)[0]
        torch.testing.assert_close(found[row], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", ["masked-test", "task"])
def test_the_loss_is_over_all_classes_or_over_the_tasks_own(using, head):
    tokens, method = streams.made("fine-tune", using, streams.stream(using), head=head)
    still(method).tasks = ["t0"]
    batch = batch_of(tokens[1])
    loss = method.loss(batch)
    outputs = method.network(batch.x)
    assert outputs.shape[1] == 3  # sport, food and space
    numbers = torch.tensor([2, 0])[batch.y]  # of the second task's classes in the stream
    by_hand = outputs if head == "masked-test" else outputs[:, [2, 0]]
    labels = numbers if head == "masked-test" else batch.y
    torch.testing.assert_close(loss, functional.cross_entropy(by_hand, labels))
    torch.testing.assert_close(batch.logits, outputs[:, [2, 0]])


def test_answers_are_the_streams_own_classes(using):
    tasks = ((("sport", "food"), (7, 3)), (("space", "sport"), (5, 7)))
    texts = streams.stream(using, tasks=tasks)
    tokens, method = streams.made("fine-tune", using, texts, epochs=4)
    for task in tokens:
        streams.learn(method, task)
    data = tokens[1].test
    x, y = data.batch(torch.arange(len(data)))
    answers = method.answers(x)
    assert set(answers.tolist()) <= {3, 5, 7}
    assert float((answers == torch.tensor([5, 7])[y]).float().mean()) > 0.8


def test_every_tenth_step_replays_a_few_kept_texts_of_each_earlier_task(using):
    tokens, method = streams.made("replay", using, streams.stream(using, 40), buffer=0.05)
    for task in tokens[:2]:
        streams.learn(method, task)
    kept = [len(method.memory.kept[f"{at}.y"]) for at in range(2)]
    assert kept == [4, 4]  # of 80 texts each
    for at, task in enumerate(tokens[:2]):  # a kept text has its own label
        whole = {tuple(x.flatten().tolist()): int(y) for x, y in
                 zip(task.train.examples(torch.arange(80)), task.train.labels, strict=True)}  # fmt: skip
        for x, y in zip(method.memory.kept[f"{at}.x"], method.memory.kept[f"{at}.y"], strict=True):
            assert whole[tuple(x.flatten().tolist())] == int(y)
    still(method).steps.zero_()
    batch = batch_of(tokens[2])
    plain = method.new_loss(batch)
    losses = [method.loss(batch) for _ in range(20)]
    assert [at for at, loss in enumerate(losses, start=1) if not torch.equal(loss, plain)] == [10, 20]
    expected = plain.clone()
    for at in range(2):  # all four of each: there are not eight
        x = method.memory.kept[f"{at}.x"].long()
        numbers = torch.tensor(streams.TASKS[at][1])[method.memory.kept[f"{at}.y"]]
        expected = expected + functional.cross_entropy(method.network(x), numbers)
    torch.testing.assert_close(losses[9], expected)
