"""Tokens as examples: what a batch has of each text, lengths, and what a memory keeps."""

import pytest
import torch
from tests.encoders import tiny
from tests.parts import need

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")

from exssnet.data.text.texts import Texts  # noqa: E402
from exssnet.data.text.tokens import TokenData  # noqa: E402
from exssnet.encoders.transformer import TransformerEncoder  # noqa: E402

TEXTS = ["the cat sat on a mat", "a dog", "", "the film ran far away . the night ran on"]


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def encoder(request, tmp_path_factory):
    return TransformerEncoder(tiny.make(tmp_path_factory.mktemp(request.param), request.param))


def data_of(encoder, texts=TEXTS):
    return TokenData.of(Texts(texts, torch.arange(len(texts))), encoder, len(texts))


def test_each_text_has_its_tokens_under_its_label_and_the_shortest_is_first(encoder):
    data, cut = data_of(encoder)
    assert cut == 0
    for at in range(4):
        x, y = data.batch(torch.tensor([at]))
        assert x.dtype == torch.int64
        ids = encoder.tokenizer(TEXTS[int(y)])["input_ids"]
        assert x[0, :, 0].tolist() == (ids or [0])  # a text of no tokens is one of padding
        assert (x[0, :, 1] == 1).all()
    assert data.labels.tolist() == [2, 1, 0, 3]
    x, _ = data.batch(torch.arange(4))
    assert x.shape == (4, len(encoder.tokenizer(TEXTS[3])["input_ids"]), 2)
    assert ((x[..., 1] > 0).sum(1) == data.lengths).all()


def test_the_halves_of_a_pair_are_told_apart(tmp_path):
    encoder = TransformerEncoder(tiny.make(tmp_path))
    data, _ = data_of(encoder, [("the cat", "a dog ran"), ("good", "bad")])
    for at in range(2):
        x, y = data.batch(torch.tensor([at]))
        made = encoder.tokenizer(*[("the cat", "a dog ran"), ("good", "bad")][int(y)])
        assert x[0].tolist() == [[i, t + 1] for i, t in zip(made["input_ids"], made["token_type_ids"], strict=True)]


def test_kept_examples_are_as_long_as_a_text_can_be_and_shown_as_long_as_they_are(encoder):
    data, _ = data_of(encoder)
    kept = data.examples(torch.tensor([1, 2]))
    assert kept.shape == (2, encoder.limit, 2)
    assert kept.dtype == torch.int32
    assert torch.equal(data.shown(kept), data.batch(torch.tensor([1, 2]))[0])


def test_tasks_are_joined_under_new_labels(encoder):
    one, two = data_of(encoder)[0], data_of(encoder, ["one two", "red"])[0]
    both = TokenData.joined([one, two], [one.labels, two.labels + 4], 6)
    assert sorted(both.labels.tolist()) == [0, 1, 2, 3, 4, 5]
    for at in range(6):
        x, y = both.batch(torch.tensor([at]))
        ids = encoder.tokenizer([*TEXTS, "one two", "red"][int(y)])["input_ids"]
        assert x[0, :, 0].tolist() == (ids or [0])


def test_an_epochs_batches_are_of_like_lengths_and_have_every_text_once(encoder):
    texts = [" ".join(["cat"] * (1 + at % 40)) for at in range(200)]
    data, _ = data_of(encoder, texts)
    order = data.order(8, torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(200))
    spread = [data.lengths[rows].max() - data.lengths[rows].min() for rows in order.split(8)]
    assert max(spread) <= 3
    assert order.tolist() != sorted(order.tolist())
