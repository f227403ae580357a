"""The text network against loops over windows in numpy, and padding that never matters."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import exssnet
from exssnet import models
from exssnet.core.network import MaskedNetwork
from exssnet.errors import InputError
from exssnet.models.text_cnn import TextCNN

WIDTH = 6


def padded(texts: list[np.ndarray], tokens: int, padding: float = 0.0) -> Tensor:
    """Token states [tokens, WIDTH] of each text as the network takes them; `padding` is what lies behind a text."""
    x = torch.full((len(texts), tokens, WIDTH + 1), padding)
    x[..., -1] = 0
    for row, text in enumerate(texts):
        x[row, : len(text), :-1] = torch.from_numpy(text).float()
        x[row, : len(text), -1] = 1
    return x


def texts_of(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(length, WIDTH)) for length in lengths]


def by_hand(network: TextCNN, text: np.ndarray, activation=np.tanh) -> np.ndarray:
    """Logits by the definition, window by window."""
    if len(text) < 5:
        text = np.concatenate([text, np.zeros((5 - len(text), WIDTH))])
    features = []
    for layer in network.convolutions:
        weight = layer.weight.detach().double().numpy()  # [filters, WIDTH, tokens]
        tokens = weight.shape[2]
        windows = [text[at : at + tokens].T for at in range(len(text) - tokens + 1)]
        features.append(np.max([activation((weight * window).sum((1, 2))) for window in windows], axis=0))
    return network.head.weight.detach().double().numpy() @ np.concatenate(features)


def network_of(classes: int = 3, filters: int = 4, activation: str = "tanh") -> TextCNN:
    torch.manual_seed(0)
    return TextCNN((16, WIDTH + 1), classes, filters, activation)


def test_it_has_the_papers_weights_and_all_of_them_are_masked() -> None:
    network = models.build("text-cnn", (256, 769), 14)
    assert sum(p.numel() for p in network.parameters()) == 768 * 200 * (3 + 4 + 5) + 600 * 14 == 1_851_600
    assert MaskedNetwork(network).layout.size == 1_851_600


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    more=st.integers(0, 6),
    padding=st.floats(-1e6, 1e6),
    activation=st.sampled_from(["tanh", "relu"]),
    training=st.booleans(),
)
def test_logits_are_those_of_the_definition_whatever_lies_behind_a_text(
    lengths: list[int], more: int, padding: float, activation: str, training: bool
) -> None:
    network = network_of(activation=activation).train(training)
    texts = texts_of(lengths)
    rule = np.tanh if activation == "tanh" else (lambda values: np.maximum(values, 0))
    logits = network(padded(texts, max(lengths) + more, padding))
    np.testing.assert_allclose(logits.detach().numpy(), [by_hand(network, t, rule) for t in texts], atol=1e-4)


def test_padding_never_wins_the_maximum() -> None:
    """Where every response in the text is negative, one from behind it would be larger."""
    network = network_of()
    with torch.no_grad():
        for layer in network.convolutions:
            layer.weight.fill_(-1.0)
    text = np.ones((7, WIDTH))
    found = network(padded([text], 16))
    assert torch.allclose(found.double(), torch.from_numpy(by_hand(network, text)), atol=1e-5)


def test_training_has_the_gradients_of_the_plain_operations() -> None:
    network, other = network_of(), network_of()
    x = padded(texts_of([0, 1, 4, 5, 9, 16, 16, 3]), 16)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    nn.functional.cross_entropy(network.train()(x), y).backward()
    nn.functional.cross_entropy(other.eval()(x), y).backward()  # autograd's own way back
    for mine, plain in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
        assert mine.grad.any()


def test_what_it_is_compiled_and_exported_from_is_the_plain_operations() -> None:
    """States that want a gradient take the plain way in training too."""
    network = network_of().train()
    x = padded(texts_of([6, 2]), 8).requires_grad_()
    network(x).sum().backward()
    assert x.grad is not None
    assert not x.grad[1, 5:, :-1].any()  # behind the text


@pytest.mark.parametrize(("shape", "width"), [((5,), 200), ((3, 32, 32), 200), ((16, 1), 200), ((16, 7), 2.5)])
def test_what_is_no_token_states_or_no_number_of_filters_is_refused(shape: tuple[int, ...], width: float) -> None:
    with pytest.raises(InputError):
        TextCNN(shape, 3, width)


def test_a_model_learns_token_states_as_it_learns_images_and_keeps_what_it_learned() -> None:
    """One tensor with its lengths in it is all that `Model` needs."""
    model = exssnet.Model(TextCNN((12, WIDTH + 1), 2, 20), density=0.3, seed=0)
    parts = []
    for seed in range(2):
        texts = texts_of([3 + (row % 9) for row in range(60)], seed)
        labels = torch.arange(60) % 2
        for text, label in zip(texts, labels.tolist(), strict=True):
            text[0] += 4 * (2 * label - 1) * (1 if seed else -1)  # the first token tells the class
        parts.append((padded(texts, 12), labels))
        model.learn(f"task {seed}", parts[-1], (6, 6))
    for seed, (x, labels) in enumerate(parts):
        answers = model.predict(x, task=f"task {seed}")
        assert (answers == labels).float().mean() > 0.9
    assert model.verify().verified
