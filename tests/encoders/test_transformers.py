"""Transformers as encoders, tiny and random, against the library called by hand."""

import json
import shutil

import numpy as np
import pytest
import torch

from exssnet import encoders
from exssnet.errors import DataError

from . import tiny

TEXTS = ["the cat sat on a mat .", "good film", "", "a dog ran far away , one two !", "Unknown words everywhere"]


@pytest.fixture(scope="module", params=["bert", "gpt2", "llama"])
def folder(request, tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("bert"))


def by_hand(folder, text, layer=None):
    """One text alone, so without any padding."""
    import transformers as library

    model = library.AutoModel.from_pretrained(folder).eval()
    given = library.AutoTokenizer.from_pretrained(folder)(*([text] if isinstance(text, str) else text))
    ids = torch.tensor([given["input_ids"]], dtype=torch.int64)
    types = {"token_type_ids": torch.tensor([given["token_type_ids"]])} if isinstance(text, tuple) else {}
    with torch.no_grad():
        out = model(ids, **types, output_hidden_states=True)
    return (out.last_hidden_state if layer is None else out.hidden_states[layer])[0].numpy()


def test_token_states_are_those_of_each_text_alone(folder):
    """Padding in a batch, other texts and their order change nothing but the last bits of rounding."""
    encoder = encoders.load(str(folder))
    assert encoder.width == tiny.WIDTH
    found = encoder.encode(TEXTS)
    assert found.cut == 0
    for text, states in zip(TEXTS, found.states, strict=True):
        assert states.dtype == np.float16
        if len(states) or text:
            np.testing.assert_allclose(states, by_hand(folder, text), atol=4e-3)
    for row, text in enumerate(TEXTS):
        np.testing.assert_allclose(encoder.encode([text]).states[0], found.states[row], atol=4e-3)


def test_evaluation_mode_draws_nothing(bert):
    encoder = encoders.load(str(bert))  # its config has dropout
    first, again = encoder.encode(TEXTS), encoder.encode(TEXTS)
    assert all((a == b).all() for a, b in zip(first.states, again.states, strict=True))
    assert not any(p.requires_grad for p in encoder.model.parameters())


def test_pairs_are_encoded_as_pairs(bert):
    encoder = encoders.load(str(bert))
    pair = ("the cat", "a dog ran")
    (found,) = encoder.encode([pair]).states
    np.testing.assert_allclose(found, by_hand(bert, pair), atol=4e-3)
    (plain,) = encoder.encode(["the cat a dog ran"]).states
    assert len(found) == len(plain) + 1


def test_an_inner_layer_can_be_chosen(bert):
    from exssnet.encoders.transformer import TransformerEncoder

    encoder = TransformerEncoder(bert, layer=1)
    np.testing.assert_allclose(encoder.encode([TEXTS[0]]).states[0], by_hand(bert, TEXTS[0], 1), atol=4e-3)
    assert encoder.digest != encoders.load(str(bert)).digest


def test_long_texts_are_cut_and_counted(bert):
    encoder = encoders.load(str(bert), limit=8)
    texts = ["one " * count for count in (5, 6, 7, 500)]  # with [CLS] and [SEP]: 7, 8, 9 and 502 tokens
    found = encoder.encode(texts)
    assert [len(states) for states in found.states] == [7, 8, 8, 8]
    assert found.cut == 2


def test_no_text_is_longer_than_the_encoder_has_positions(bert):
    encoder = encoders.load(str(bert), limit=256)
    assert encoder.limit == 64
    assert len(encoder.encode(["one " * 500]).states[0]) == 64


def test_static_vectors_are_rows_of_the_embedding_table(folder):
    import transformers as library

    table = library.AutoModel.from_pretrained(folder).get_input_embeddings().weight.detach()
    ids = library.AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
    encoder = encoders.load(f"static:{folder}")
    np.testing.assert_allclose(encoder.encode([TEXTS[0]]).states[0], table[ids].numpy(), atol=1e-3)
    assert encoder.digest != encoders.load(str(folder)).digest


def test_the_digest_follows_weights_tokenizer_and_limit(bert, tmp_path):
    plain = encoders.load(str(bert)).digest
    assert encoders.load(str(shutil.copytree(bert, tmp_path / "copy"))).digest == plain
    assert encoders.load(str(bert), limit=8).digest != plain
    assert encoders.load(str(tiny.make(tmp_path / "other", seed=1))).digest != plain
    words = json.loads((tmp_path / "copy" / "tokenizer.json").read_text())
    words["model"]["vocab"]["cat"], words["model"]["vocab"]["dog"] = 10, 6
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(words))
    assert encoders.load(str(tmp_path / "copy")).digest != plain


def test_the_digest_loads_no_weights(bert, monkeypatch):
    import transformers as library

    monkeypatch.setattr(library.AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert len(encoders.load(str(bert)).digest) == 64


def damage(folder, how):
    if how == "config.json is missing":
        (folder / "config.json").unlink()
    elif how == "config.json is not JSON":
        (folder / "config.json").write_text("{")
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "damaged weights":
        (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    elif how == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    elif how == "code of its own":
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoModel": "own.Model", "AutoConfig": "own.Config"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text("raise SystemExit('code was run')")
    else:
        config = json.loads((folder / "config.json").read_text()) | {"is_encoder_decoder": True}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "how",
    ["config.json is missing", "config.json is not JSON", "no weights", "damaged weights", "no tokenizer",
     "code of its own", "an encoder and a decoder"],
)  # fmt: skip
def test_a_folder_that_is_not_an_encoder_is_refused_in_a_line(bert, tmp_path, how):
    folder = shutil.copytree(bert, tmp_path / "folder")
    damage(folder, how)
    with pytest.raises(DataError) as refused:
        encoders.load(str(folder)).encode(["the cat"])
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


def test_pickled_weights_are_never_read(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="safetensors"):
        encoders.load(str(folder))
