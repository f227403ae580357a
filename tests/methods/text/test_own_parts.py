"""Adapters and prompts, against the plain encoder."""

import pytest
import torch
from tests.parts import need
from torch.nn import functional

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from exssnet.errors import InputError  # noqa: E402
from exssnet.methods.text.prompt_tuning import Prompted  # noqa: E402
from exssnet.models.adapters import norms, put_in  # noqa: E402
from exssnet.models.text_classifier import TextClassifier  # noqa: E402

from . import streams  # noqa: E402


@pytest.fixture(params=["bert", "gpt2", "llama"])
def using(request, encoders):
    return encoders[request.param]


def tokens_of(using, count=12):
    data = streams.made("fine-tune", using, streams.stream(using))[0][0].train
    return data.batch(torch.arange(len(data))[-count:])[0]  # the longest


def adapters(network):
    return [module for name, module in network.named_modules() if name.endswith(".adapter")]


@pytest.mark.parametrize("name", ["adapter-ft", "adapter-replay", "multi-adapter"])
def test_an_adapter_whose_up_projection_is_zero_is_the_plain_encoder(using, name):
    _, plain = streams.made("fine-tune", using, streams.stream(using))
    _, method = streams.made(name, using, streams.stream(using), start=0.3)
    x = tokens_of(using)
    expected = plain.network.eval().features(x)
    changed = method.network.eval().features(x)
    assert float((changed - expected).detach().abs().max()) > 0.01
    assert len(adapters(method.network)) == 4  # two layers, each with attention and feed-forward
    with torch.no_grad():
        for adapter in adapters(method.network):
            adapter.up.weight.zero_()
    torch.testing.assert_close(method.network.features(x), expected, atol=1e-6, rtol=1e-5)


def test_an_adapter_comes_before_the_residual_sum(bert):
    """One layer of BERT by hand."""
    _, method = streams.made("adapter-ft", bert, streams.stream(bert), start=0.3)
    layer = method.network.encoder.eval().encoder.layer[0].output
    hidden, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 16)
    a = layer.dense.adapter
    projected = hidden @ layer.dense.weight.T + layer.dense.bias
    inner = functional.gelu(projected @ a.down.weight.T + a.down.bias)
    summed = projected + inner @ a.up.weight.T + a.up.bias + residual
    expected = functional.layer_norm(summed, (16,), layer.LayerNorm.weight, layer.LayerNorm.bias, 1e-12)
    torch.testing.assert_close(layer(hidden, residual), expected)


def test_only_adapters_norms_and_head_are_trained(using):
    tokens, method = streams.made("adapter-ft", using, streams.stream(using, 8), epochs=1)
    before = {n: p.clone() for n, p in method.network.named_parameters()}
    streams.learn(method, tokens[0])
    moved = {n for n, p in method.network.named_parameters() if not torch.equal(p, before[n])}
    allowed = {n for n in before if ".adapter." in n or n.startswith("head.") or "norm" in n.lower() or ".ln_" in n}
    assert moved <= allowed
    assert {n for n in allowed if ".adapter.up" in n} <= moved
    assert any("norm" in n.lower() or "ln_" in n for n in moved)
    assert method.report()["storage"]["weight_bits"] == 32 * sum(before[n].numel() for n in allowed)


def test_a_network_without_known_projections_is_refused():
    with pytest.raises(InputError, match="Linear has no layer called one of output"):
        put_in(torch.nn.Linear(2, 2), 2, 2, 0.1, torch.Generator())


def test_the_first_token_reads_the_prompts_and_the_text_behind_them(bert):
    """Against the encoder on embeddings spliced by hand, one text at a time."""
    _, method = streams.made("prompt-tuning", bert, streams.stream(bert), prompts=3)
    x = tokens_of(bert)
    network = method.network.eval()
    found = network.features(x)
    table = bert.model.get_input_embeddings().weight
    for row in range(len(x)):
        words = table[x[row][x[row, :, 1] > 0][:, 0]]
        spliced = torch.cat((words[:1], network.prompts, words[1:]))[None]
        expected = bert.model(inputs_embeds=spliced).last_hidden_state[0, 0]
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)


def test_prompts_change_nothing_in_the_encoder(using):
    tokens, method = streams.made("prompt-tuning", using, streams.stream(using, 8), prompts=5)
    for task in tokens:
        streams.learn(method, task)
    own = dict(method.network.encoder.named_parameters())
    assert own.keys() == dict(using.model.named_parameters()).keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in using.model.named_parameters())
    x = tokens_of(using)
    states = method.network.states(x)[x[..., 1] > 0]
    plain = using.model(input_ids=x[..., 0], attention_mask=(x[..., 1] > 0).long()).last_hidden_state
    assert torch.equal(states, plain[x[..., 1] > 0])
    counts = [len(task.classes) for task in tokens]
    assert method.report()["storage"] == {"weight_bits": sum(32 * (5 * 16 + c * 16 + c) for c in counts)}


def test_a_causal_model_is_read_at_its_last_token(tmp_path):
    using = streams.encoder(tmp_path, "gpt2")
    _, method = streams.made("prompt-tuning", using, streams.stream(using), prompts=3)
    x = tokens_of(using)
    changed = x.clone()
    lengths = (x[..., 1] > 0).sum(1)
    changed[torch.arange(len(x)), lengths - 1, 0] += 1
    network = method.network.eval()
    assert not torch.isclose(network.features(x), network.features(changed)).all(1).any()


def test_prompts_that_leave_no_room_for_a_text_are_refused_and_long_texts_cut(tmp_path):
    short = streams.encoder(tmp_path, positions=20)
    with pytest.raises(InputError, match=r"prompts is 15: of the encoder's 20 positions .* give at most 12"):
        streams.made("prompt-tuning", short, streams.stream(short), prompts=15)
    _, method = streams.made("prompt-tuning", short, streams.stream(short), prompts=12)
    x = tokens_of(short, 24)
    assert x.shape[1] > 8
    torch.testing.assert_close(method.network.eval().features(x), method.network.features(x[:, :8]))


def library_model(kind):
    """A tiny model of another architecture, with room for 20 positions."""
    import transformers as library

    few = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    few |= {"intermediate_size": 24, "initializer_range": 0.2}
    config = {
        "mpnet": lambda: library.MPNetConfig(**few, max_position_embeddings=22),
        "roberta": lambda: library.RobertaConfig(**few, max_position_embeddings=22, type_vocab_size=1),
        "distilbert": lambda: library.DistilBertConfig(
            vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=20
        ),
    }[kind]()
    torch.manual_seed(0)
    return library.AutoModel.from_config(config, attn_implementation="eager").eval().requires_grad_(False)


def some_tokens(length):
    draw = torch.Generator().manual_seed(0)
    return torch.stack((torch.randint(4, 30, (3, length), generator=draw), torch.ones(3, length, dtype=torch.int64)), 2)


@pytest.mark.parametrize("kind", ["mpnet", "roberta", "distilbert"])
def test_other_architectures_have_adapters_in_every_layer(kind):
    network = TextClassifier(library_model(kind), 2, "mean", torch.Generator().manual_seed(0))
    expected = network.features(some_tokens(7))
    put_in(network.encoder, 16, 4, 0.3, torch.Generator().manual_seed(0))
    assert len(adapters(network)) == 4
    assert not torch.isclose(network.features(some_tokens(7)), expected, atol=1e-3).all()
    for adapter in adapters(network):
        adapter.up.weight.data.zero_()
    torch.testing.assert_close(network.features(some_tokens(7)), expected)
    assert len(norms(network.encoder)) == 10  # weight and bias: behind the embeddings, and two in each layer


@pytest.mark.parametrize("kind", ["mpnet", "roberta", "distilbert"])
def test_prompts_and_a_text_may_take_all_positions_of_other_architectures(kind):
    network = Prompted(library_model(kind), 2, 9, torch.Generator().manual_seed(0))
    assert network.room == 11
    whole = network.features(some_tokens(11))
    assert whole.isfinite().all()
    torch.testing.assert_close(network.features(torch.cat((some_tokens(11), some_tokens(5)), 1)), whole)


def test_gradients_are_clipped_where_the_settings_say_so(bert):
    norms_found = []
    for clip in (0.0, 0.01):
        _, method = streams.made("adapter-ft", bert, streams.stream(bert), clip=clip)
        batch_loss = functional.cross_entropy(method.forward(tokens_of(bert), training=True), torch.zeros(12).long())
        batch_loss.backward()
        method.after_backward()
        norms_found.append(float(torch.cat([p.grad.flatten() for p in method.trained().values()]).norm()))
    assert norms_found[0] > 0.02
    assert norms_found[1] == pytest.approx(0.01, rel=1e-3)
