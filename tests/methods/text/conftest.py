"""The tiny encoders of these tests, made once."""

import pytest
from tests.parts import need


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
    from . import streams

    folder = tmp_path_factory.mktemp("encoders")
    return {kind: streams.encoder(folder, kind) for kind in ("bert", "gpt2", "llama")}


@pytest.fixture(scope="session")
def bert(encoders):
    return encoders["bert"]
