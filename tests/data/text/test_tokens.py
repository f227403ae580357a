"""Token ids as examples: a transformer run on them gives the encoder's own states."""

import numpy as np
import pytest
import torch
from tests.encoders import tiny

from exssnet import encoders
from exssnet.data.text.stream import TextStream, TextTask
from exssnet.data.text.texts import Texts
from exssnet.data.text.tokens import ABSENT, as_model_input
from exssnet.errors import InputError

TEXTS = ["the cat sat", "a dog ran far away .", "good film", "one two one two one two one", "bad story !", "red"]


@pytest.fixture(scope="module", params=["single", "pair"])
def stream(request, tmp_path_factory):
    folder = tiny.make(tmp_path_factory.mktemp("bert"))
    texts = TEXTS if request.param == "single" else list(zip(TEXTS, reversed(TEXTS), strict=True))
    made = Texts(texts, torch.arange(6) % 2)
    return TextStream("some", (TextTask("one", ("a", "b"), (0, 1), made, made),), encoders.load(str(folder), limit=12))


def test_a_transformer_on_the_ids_gives_the_states_of_the_encoder(stream):
    tokens, states = stream.as_tokens()[0].train, stream[0].train
    assert tokens.lengths.tolist() == states.lengths.tolist()
    for index in (torch.arange(6), torch.tensor([5, 0])):
        x, y = tokens.batch(index)
        wanted, labels = states.batch(index)
        assert y.tolist() == labels.tolist()
        with torch.no_grad():
            found = stream.encoder.model(**as_model_input(x)).last_hidden_state
        present = wanted[..., -1] > 0
        assert (x[..., 0] != ABSENT).tolist() == present.tolist()
        np.testing.assert_allclose(found[present], wanted[..., :-1][present], atol=4e-3)


def test_remembered_examples_are_shown_as_they_were(stream):
    tokens = stream.as_tokens()[0].train
    index = torch.tensor([0, 2])
    kept = tokens.examples(index)
    assert kept.shape == (2, *tokens.shape) == (2, *stream.as_tokens().input_shape)
    assert tokens.shown(kept).tolist() == tokens.batch(index)[0].tolist()


def test_word_vectors_have_no_ids(stream):
    words = TextStream("some", stream.tasks, encoders.load("random:4"))
    with pytest.raises(InputError, match="transformers"):
        words.as_tokens()


def test_cut_texts_are_counted_in_both(stream):
    assert stream.text_counts() == stream.as_tokens().text_counts()
