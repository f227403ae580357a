"""IDBR's losses and memory, against the formulas by hand."""

import pytest
import torch
from tests.parts import need
from torch.nn import functional

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from exssnet.data.text.tokens import padded  # noqa: E402
from exssnet.errors import InputError  # noqa: E402
from exssnet.methods.text.idbr import both_orders  # noqa: E402

from . import streams  # noqa: E402
from .test_fine_tune import batch_of, still  # noqa: E402


def row(*pairs, length=8):
    return [*map(list, pairs), *[[0, 0]] * (length - len(pairs))]


def test_a_text_is_cut_in_two_and_shown_in_both_orders():
    x = torch.tensor([row((2, 1), (7, 1), (8, 1), (3, 1)), row((2, 1), (9, 1), (3, 1)), row((2, 1), (3, 1))])
    made = both_orders(x, 64, torch.Generator().manual_seed(0))
    assert made.tolist() == [
        row((2, 1), (7, 1), (3, 1), (8, 2), (3, 2), length=5),  # two words: one cut is possible
        row((2, 1), (9, 1), (3, 1), (3, 2), length=5),
        row((2, 1), (3, 1), (3, 2), length=5),
        row((2, 1), (8, 1), (3, 1), (7, 2), (3, 2), length=5),
        row((2, 1), (3, 1), (9, 2), (3, 2), length=5),
        row((2, 1), (3, 1), (3, 2), length=5),
    ]


def test_cuts_are_drawn_anew_and_long_texts_leave_room_for_the_second_separator():
    x = torch.tensor([[(2, 1), *[(at, 1) for at in range(10, 40)], (3, 1)]])
    generator = torch.Generator().manual_seed(1)
    firsts = {both_orders(x, 20, generator)[0, :, 0].tolist().index(3) for _ in range(200)}
    assert firsts == {at + 2 - 1 for at in range(1, 17)}  # of 17 words at most, at least one on either side
    made = both_orders(x, 20, generator)
    assert made.shape == (2, 20, 2)
    assert all(sorted(ids) == sorted([2, 3, 3, *range(10, 27)]) for ids in made[..., 0].tolist())


@pytest.mark.parametrize("name", ["idbr", "regularization"])
@pytest.mark.parametrize("replays", [False, True])
def test_the_loss_by_hand(bert, name, replays):
    tokens, method = streams.made(name, bert, streams.stream(bert, 30), buffer=0.05, every=1 if replays else 100)
    for task in tokens[:2]:
        streams.learn(method, task)
    net = still(method).network
    with torch.no_grad():  # a way from where the task began, so that there is a pull
        net.general.weight.add_(0.05)
        net.specific.weight.sub_(0.03)
    batch = batch_of(tokens[2])
    found = method.loss(batch)
    draw = torch.Generator().manual_seed(0)
    drawn = [(2, batch.x, batch.y)]
    expected = 0.0
    copies = 2 if name == "idbr" else 1

    def of_task(task, x, y):
        if copies == 2:
            x = both_orders(x, 96, draw)
        h = net.states(x)[:, 0]
        g, s = torch.tanh(net.general(h)), torch.tanh(net.specific(h))
        outputs = torch.cat((g, s), 1) @ net.head.weight.T + net.head.bias
        numbers = torch.tensor(streams.TASKS[task][1])[torch.cat([y] * copies)]
        total = functional.cross_entropy(outputs, numbers)
        if copies == 2:
            swapped = torch.tensor([0] * len(y) + [1] * len(y))
            total = total + functional.cross_entropy(net.swapped(g), swapped)
            if replays:
                asked = (s @ net.task.weight.T + net.task.bias) * (5e-4 / 1e-2)
                total = total + functional.cross_entropy(asked, torch.full((2 * len(y),), task))
        old = before(x)
        pull = 5.0 if replays else 0.5
        return total + pull * (0.5 * (g - old[0]).square().mean() + 0.5 * (s - old[1]).square().mean())

    def before(x):
        with torch.no_grad():
            kept = method.before
            h = net.states(x)[:, 0]  # the encoder has not moved since
            old = [h @ kept[f"{name}.weight"].T + kept[f"{name}.bias"] for name in ("general", "specific")]
        return [torch.tanh(one) for one in old]

    expected = of_task(*drawn[0])
    if replays:
        for task in range(2):
            x, y = method.memory.draw(task, 8, draw)
            expected = expected + of_task(task, x, y)
    torch.testing.assert_close(found, expected)
    assert len(batch.logits) == len(batch.y)


def test_on_the_first_task_nothing_is_pulled_and_no_task_is_asked_for(bert):
    tokens, method = streams.made("regularization", bert, streams.stream(bert), every=1)
    batch = batch_of(tokens[0])
    loss = still(method).loss(batch)
    torch.testing.assert_close(loss, functional.cross_entropy(method.network(batch.x), batch.y))


def test_the_memory_has_the_examples_nearest_to_the_centres_of_clusters(bert):
    """Texts in four far groups: one of each is kept."""
    tokens, method = streams.made("idbr", bert, streams.stream(bert, 20), buffer=0.1)
    data = tokens[0].train
    texts = [tuple(a.flatten().tolist()) for a in data.examples(torch.arange(len(data)))]
    known = {text: at for at, text in enumerate(texts)}
    groups = torch.tensor([known[text] for text in texts]) % 4  # texts that are the same are in one group
    features = torch.eye(16)[groups] * 9 + torch.randn(len(data), 16, generator=torch.Generator().manual_seed(0)) / 10
    features = features[[known[text] for text in texts]]

    def of_rows(self, x):
        return torch.stack([features[known[tuple(a.flatten().tolist())]] for a in padded(x, data.shape[0])])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exssnet.models.text_classifier.TextClassifier.features", of_rows)
        rows = method.chosen(tokens[0])
    assert len(rows) == 4
    assert sorted(groups[rows].tolist()) == [0, 1, 2, 3]
    centres = torch.stack([features[groups == group].mean(0) for group in groups[rows].tolist()])
    nearest = torch.cdist(centres, features).argmin(1)
    assert nearest.tolist() == rows.tolist()


def test_a_causal_model_is_refused(encoders):
    with pytest.raises(InputError, match="GPT2Model is causal"):
        streams.made("idbr", encoders["gpt2"], streams.stream(encoders["gpt2"]))
