"""LAMOL: its sequences, its loss by hand, what it writes and how it answers."""

import pytest
import torch
from tests.parts import need
from torch.nn import functional

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from exssnet.data.text.tokens import TokenStream  # noqa: E402
from exssnet.errors import InputError  # noqa: E402
from exssnet.methods.text.lamol import Example, Marks  # noqa: E402

from . import streams  # noqa: E402
from .test_fine_tune import batch_of, still  # noqa: E402

MARKS = Marks(100, 3)
ANS, END, GEN = 100, 101, (102, 103, 104)
words = st.lists(st.integers(0, 99), min_size=1, max_size=8)


@pytest.fixture
def gpt2(encoders):
    return encoders["gpt2"]


@given(words, words, st.integers(0, 2))
def test_a_sequence_is_read_back(asked, answer, task):
    example = Example(asked, answer)
    assert MARKS.language(example, task) == [GEN[task], *asked, ANS, *answer, END]
    assert MARKS.question(example) == [*asked, ANS, *answer, END]
    assert MARKS.read(MARKS.language(example, task)) == example
    assert MARKS.read([*MARKS.language(example, task), END, 5, ANS]) == example  # what is behind the end is not read
    assert MARKS.read(MARKS.language(example, task)[:-1]) == example  # it was as long as it may be


@pytest.mark.parametrize(
    "malformed",
    [
        [],
        [GEN[0]],
        [GEN[0], 1, 2, 3, END],
        [GEN[0], 1, ANS, 2, ANS, 3, END],
        [GEN[0], 1, ANS, ANS, 3, END],
        [GEN[0], ANS, 3, END],
        [GEN[0], 1, 2, ANS, END],
        [GEN[0], 1, 2, END, ANS, 3],
        [GEN[0], 1, GEN[1], 2, ANS, 3, END],
        [1, 2, ANS, 3, END],
        [ANS, 1, ANS, 3, END],
        [105, 1, ANS, 3, END],
    ],
)
def test_a_malformed_sequence_is_refused(malformed):
    assert MARKS.read(malformed) is None


def test_the_question_names_the_tasks_classes(gpt2, monkeypatch):
    said = []

    def tokenizer(texts, **options):
        said.extend(texts)
        assert options == {"add_special_tokens": False}
        return {"input_ids": [[1]] * len(texts)}

    tokens = TokenStream(streams.stream(gpt2), "lamol")
    monkeypatch.setattr(tokens.encoder, "tokenizer", tokenizer)
    tokens.outline()
    assert "Is this sentence sport or food?" in said
    assert "Is this sentence food, space, or sport?" in said
    assert said[1:3] == ["sport", "food"]


def test_the_loss_by_hand(gpt2):
    """Answers alone, and a quarter of whole sequences; without padding, one row after the other."""
    tokens, method = streams.made("lamol", gpt2, streams.stream(gpt2))
    next(still(method).phases(tokens[0]))
    batch = batch_of(tokens[0], 4)
    found = method.loss(batch)
    table, wording = method.network.table, method.wordings[0]
    first = gpt2.model.get_input_embeddings().weight.shape[0]
    assert len(table) == first + 2 + 3
    answers, whole = [], []
    for x, y in zip(batch.x, batch.y, strict=True):
        context = x[x[:, 1] > 0][:, 0].tolist()
        row = [*context, *wording.question, first, *wording.answers[y], first + 1]
        states = method.network.encoder(input_ids=torch.tensor([row])).last_hidden_state[0]
        each = functional.cross_entropy(states[:-1] @ table.T, torch.tensor(row[1:]), reduction="none")
        answers.append(each[len(context) + len(wording.question) :])
        row = [first + 2, *row]
        states = method.network.encoder(input_ids=torch.tensor([row])).last_hidden_state[0]
        whole.append(functional.cross_entropy(states[:-1] @ table.T, torch.tensor(row[1:]), reduction="none"))
    expected = torch.cat(answers).mean() + 0.25 * torch.cat(whole).mean()
    torch.testing.assert_close(found, expected)
    assert batch.logits.shape == (4, 3)  # two classes, and none


def test_greedy_answers_are_those_of_each_row_alone_and_of_sampling_the_best(gpt2):
    _, method = streams.made("lamol", gpt2, streams.stream(gpt2))
    network = method.network.eval()
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    found = network.continued(rows, 4)
    for row, said in zip(rows, found, strict=True):
        ids = list(row)
        for _ in range(4):
            states = network.encoder(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            ids.append(int((states @ network.table.T).argmax()))
        assert ids[len(row) :] == said
    sampled = network.sampled(8, 2, 5, -1, 1, torch.Generator())
    assert sampled.tolist() == [[8, *found[1]]] * 2


def test_sampling_draws_from_the_likeliest_tokens_and_stops_at_the_end(gpt2):
    _, method = streams.made("lamol", gpt2, streams.stream(gpt2))
    network = method.network.eval()
    best = (network.states(torch.tensor([[8]]))[0, -1] @ network.table.T).topk(3).indices.tolist()
    rows = network.sampled(8, 300, 2, -1, 3, torch.Generator().manual_seed(0))
    assert set(rows[:, 1].tolist()) == set(best)
    ended = network.sampled(8, 50, 12, best[0], 3, torch.Generator().manual_seed(0)).tolist()
    stops = [row.index(best[0]) for row in ended if best[0] in row]
    assert stops
    assert all(set(row[row.index(best[0]) :]) == {best[0]} for row in ended if best[0] in row)


def test_only_an_exact_answer_is_right(gpt2, monkeypatch):
    tokens, method = streams.made("lamol", gpt2, streams.stream(gpt2))
    x, _ = tokens[0].test.batch(torch.arange(4))
    first, second = (list(answer) for answer in method.wordings[0].answers)
    end = method.marks.end
    said = [[*second, end], [*first, end, 7], [*first, 7], [7, *first]]
    monkeypatch.setattr(method.network, "continued", lambda rows, count: said)
    assert method.decoded(x, 0).argmax(1).tolist() == [1, 0, 2, 2]  # 2: no class, which no label is


def test_it_writes_examples_of_earlier_tasks_and_learns_them_again(gpt2):
    texts = streams.stream(gpt2, 40)
    tokens, method = streams.made("lamol", gpt2, texts, written=1.0, language=1.0, epochs=12, top=3)
    for task in tokens[:2]:
        streams.learn(method, task)
    phases = method.phases(tokens[2])
    next(phases)
    of = method.pseudo["2.of"].tolist()
    assert len(of) > 30  # of 120 that were written
    assert set(of) == {0, 1}
    assert max(of.count(0), of.count(1)) <= 60
    assert len(method._recalled(batch_of(tokens[2], 30))) - len(of) * 30 // 120 in (0, 1)
    example, task = method._recalled(batch_of(tokens[2], 30))[0]
    assert task in (0, 1)
    assert method.marks.read(method.marks.language(example, task)) == example
    before = {name: tensor.clone() for name, tensor in method.pseudo.items()}
    next(method.phases(tokens[2]))  # a run that is taken up: not written again
    assert streams.equal(before, dict(method.pseudo.items()))


def test_models_that_cannot_write_and_names_that_are_the_same_are_refused(encoders):
    with pytest.raises(InputError, match="BertModel is not causal"):
        streams.made("lamol", encoders["bert"], streams.stream(encoders["bert"]))
    with pytest.raises(InputError, match="LlamaModel has an output layer other than"):
        streams.made("lamol", encoders["llama"], streams.stream(encoders["llama"]))
    texts = streams.stream(encoders["gpt2"])
    object.__setattr__(texts.tasks[0], "class_names", ("nothing known", "all unknown"))  # two unknown words each
    with pytest.raises(InputError, match="two of a task are the same"):
        streams.made("lamol", encoders["gpt2"], texts)
