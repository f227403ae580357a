"""What every method that trains a text encoder must pass, on tiny transformers with random weights."""

import json

import pytest
import torch
from tests.parts import need

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from exssnet.errors import ForgettingError, InputError  # noqa: E402
from exssnet.experiments.config import resolve  # noqa: E402
from exssnet.methods import methods  # noqa: E402
from exssnet.methods.base import JointMethod  # noqa: E402
from exssnet.methods.text._base import AllClasses  # noqa: E402
from exssnet.train import Trainer, TrainSettings, checkpoint  # noqa: E402

from . import streams  # noqa: E402

NAMES = [name for name, kind in methods().items() if kind.trains_encoder]
IN_TURN = [name for name in NAMES if not issubclass(methods()[name], JointMethod)]
PROVED = [name for name in NAMES if methods()[name].exclusive]
CAUSAL = ("lamol",)  # methods that need a causal model
FIRST = ("idbr", "regularization")  # methods that read [CLS]

every_method = pytest.mark.parametrize("name", NAMES)
method_in_turn = pytest.mark.parametrize("name", IN_TURN)


@pytest.fixture
def using(encoders, name):
    return encoders["gpt2" if name in CAUSAL else "bert"]


@every_method
def test_it_learns_a_stream_well_above_chance(using, name):
    tokens, method = streams.made(name, using, streams.stream(using))
    learned = []
    if isinstance(method, JointMethod):
        streams.learn(method, method.together(list(tokens)))
        learned = [streams.tested(method, task) for task in tokens]
    else:
        for task in tokens:
            streams.learn(method, task)
            learned.append(streams.tested(method, task))
    assert min(learned[0] / 50, learned[1] / 50, learned[2] / 33) > 1.4
    assert all(isinstance(size, int) and size > 0 for size in method.report()["storage"].values())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("name", [name for name in IN_TURN if name not in CAUSAL + FIRST])
def test_it_learns_on_causal_models_too(encoders, name, kind):
    using = encoders[kind]
    tokens, method = streams.made(name, using, streams.stream(using), epochs=4)
    streams.learn(method, tokens[0])
    assert streams.tested(method, tokens[0]) > 65


@method_in_turn
def test_its_state_survives_a_checkpoint_and_it_goes_on_with_the_same_bits(tmp_path, using, name):
    texts = streams.stream(using, 12)
    tokens, method = streams.made(name, using, texts, epochs=2)
    for task in tokens[:2]:
        streams.learn(method, task)
    checkpoint.write(tmp_path / "c", *method.state())
    _, again = streams.made(name, using, texts, epochs=2)
    again.load_state(*checkpoint.read(tmp_path / "c"))
    for index in range(2):
        x, _ = tokens[index].test.batch(torch.arange(12))
        assert torch.equal(method.logits(x, tokens[index].name), again.logits(x, tokens[index].name))
    for one in (method, again):
        streams.learn(one, tokens[2])
    assert streams.equal(method.state()[0], again.state()[0])
    assert json.dumps(method.state()[1]) == json.dumps(again.state()[1])


@every_method
@pytest.mark.parametrize("epochs", [1, 3])
def test_an_interrupted_task_ends_in_the_same_bits(tmp_path, using, name, epochs):
    """Stopped in the middle of the second task, or of the only one; another method goes on from what was saved."""

    class Stop(Exception):
        pass

    texts = streams.stream(using, 10)

    def tasks_of(method, tokens):
        return [method.together(list(tokens))] if isinstance(method, JointMethod) else tokens[:2]

    tokens, whole = streams.made(name, using, texts, epochs=4)
    for task in tasks_of(whole, tokens):
        streams.learn(whole, task)
    tokens, cut = streams.made(name, using, texts, epochs=4)
    tasks = tasks_of(cut, tokens)
    for task in tasks[:-1]:
        streams.learn(cut, task)
    done = []

    def stop():
        done.append(1)
        if len(done) == epochs:
            tensors, facts = trainer.snapshot()
            checkpoint.write(tmp_path / "trainer", tensors, facts)
            checkpoint.write(tmp_path / "method", *cut.state())
            raise Stop

    settings = TrainSettings(8, "adamw", weight_decay=0.0, schedule="constant")
    trainer = Trainer(cut, 0, settings, after_epoch=stop)
    with pytest.raises(Stop):
        trainer.learn(tasks[-1])
    tokens, again = streams.made(name, using, texts, epochs=4)
    task = tasks_of(again, tokens)[-1]
    again.load_state(*checkpoint.read(tmp_path / "method"))
    Trainer(again, 0, settings).learn(task, checkpoint.read(tmp_path / "trainer"))
    assert streams.equal(whole.state()[0], again.state()[0])


@pytest.mark.parametrize("name", PROVED)
def test_an_earlier_task_answers_bit_for_bit_as_when_it_was_learned(using, name):
    tokens, method = streams.made(name, using, streams.stream(using, 12))
    x, _ = tokens[0].test.batch(torch.arange(20))
    streams.learn(method, tokens[0])
    before, digest = method.logits(x, "t0"), method.verify().digests["t0"]
    for task in tokens[1:]:
        streams.learn(method, task)
    assert torch.equal(method.logits(x, "t0"), before)
    proof = method.verify()
    assert proof.verified
    assert proof.digests["t0"] == digest
    assert len(set(proof.digests.values())) == 3


@pytest.mark.parametrize("name", PROVED)
def test_what_a_task_learns_does_not_depend_on_earlier_tasks(using, name):
    texts = streams.stream(using, 12)
    tokens, alone = streams.made(name, using, texts)
    streams.learn(alone, tokens[1])
    _, second = streams.made(name, using, texts)
    for task in tokens[:2]:
        streams.learn(second, task)
    assert alone.verify().digests["t1"] == second.verify().digests["t1"]


@pytest.mark.parametrize("name", PROVED)
def test_a_task_that_was_tampered_with_is_found_out(using, name):
    tokens, method = streams.made(name, using, streams.stream(using, 12), epochs=1)
    streams.learn(method, tokens[0])
    tensors, facts = method.state()
    own = next(n for n in tensors if n.startswith("stored.") and n.endswith("head.weight"))
    _, again = streams.made(name, using, streams.stream(using, 12), epochs=1)
    with pytest.raises(ForgettingError, match="t0"):
        again.load_state({**tensors, own: tensors[own] + 1}, facts)
    again.load_state(tensors, facts)
    with torch.no_grad():
        next(p for n, p in method.network.named_parameters() if n.endswith("word_embeddings.weight")).add_(1)
    if name != "text-individual":  # whose tasks have embeddings of their own
        with pytest.raises(ForgettingError):
            method.verify()


@every_method
def test_both_settings_are_there_for_methods_that_can_do_both(tmp_path, name):
    kind = methods()[name]
    planned = {"encoder": "/none"}
    assert resolve("webnlp-s2", name, 0, **planned).setting == "task-incremental"
    if issubclass(kind, AllClasses):
        assert resolve("webnlp-s2", name, 0, setting="class-incremental", **planned).head == kind.heads[0]
    else:
        with pytest.raises(InputError, match="among all classes"):
            resolve("webnlp-s2", name, 0, setting="class-incremental", **planned)


@every_method
def test_streams_without_texts_are_refused(name):
    with pytest.raises(InputError, match="has no texts"):
        resolve("split-digits", name, 0)
