"""A stream of three small text tasks, a tiny encoder for it, and methods prepared on them."""

from pathlib import Path

import torch
from tests.data.text.made import FILLER, TOPICS, texts_of
from tests.encoders import tiny

from exssnet.data.text.stream import TextStream, TextTask
from exssnet.data.text.texts import Texts
from exssnet.data.text.tokens import TokenData, TokenStream
from exssnet.encoders.transformer import TransformerEncoder
from exssnet.experiments.config import resolve
from exssnet.methods import methods
from exssnet.models.text_classifier import TextClassifier
from exssnet.train import Trainer, TrainSettings, accuracy

WORDS = [*dict.fromkeys([*" ".join(TOPICS.values()).split(), *FILLER, *TOPICS])]
TASKS = ((("sport", "food"), (0, 1)), (("space", "sport"), (2, 0)), (("food", "space", "sport"), (1, 2, 0)))
QUICK = {"lr": 1e-2, "epochs": 3, "prompts": 5, "size": 8, "longest": 40}
OWN = {"lamol": {"lr": 3e-3, "epochs": 8}}  # it learns to write, too


def encoder(folder: Path, kind: str = "bert", positions: int = 96) -> TransformerEncoder:
    """A new tiny transformer that has seen the topics: the states of a random one say too little while it is frozen."""
    new = tiny.make(folder / kind, kind, positions=positions, words=WORDS, spread=0.1)
    found = TransformerEncoder(new)
    network = TextClassifier(found.model.requires_grad_(True), 3, "first", torch.Generator().manual_seed(0)).train()
    data, _ = TokenData.of(texts_of(list(TOPICS), 60, seed=9, longest=6), found, 3)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    torch.manual_seed(0)
    for _ in range(12):
        for rows in torch.randperm(len(data)).split(16):
            x, y = data.batch(rows)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            optimizer.step()
    found.model.save_pretrained(new)
    return TransformerEncoder(new)


def stream(using: TransformerEncoder, count: int = 24, tasks=TASKS) -> TextStream:
    """Tasks that share their classes, with as many texts of each class."""
    made = [
        TextTask(f"t{at}", topics, numbers, texts_of(topics, count, seed=at), texts_of(topics, 10, seed=50 + at))
        for at, (topics, numbers) in enumerate(tasks)
    ]
    return TextStream("toy", made, using)


def one_of(texts, topics):
    return TextStream("one", [TextTask("one", topics, tuple(range(len(topics))), texts, texts)], None)


def made(name: str, using: TransformerEncoder, texts: TextStream, seed: int = 0, head: str = "", **changes):
    """The tokens, and a method on a copy of the encoder."""
    import copy

    kind = methods()[name]
    known = {key: value for key, value in QUICK.items() if hasattr(kind.settings_type, key)}
    tokens = TokenStream(texts, name)
    module = copy.deepcopy(using.model).requires_grad_(True)
    settings = kind.settings_type(**(known | OWN.get(name, {}) | changes))
    return tokens, kind(module, settings, seed, head or kind.heads[0], tokens.outline())


def learn(method, task, seed: int = 0, batch_size: int = 8, **options):
    settings = TrainSettings(batch_size, "adamw", weight_decay=0.0, schedule="constant")
    return Trainer(method, seed, settings, **options).learn(task)


def tested(method, task) -> float:
    """Accuracy on the test texts, told the task."""
    return accuracy(lambda x: method.logits(x, task.name), task.test)


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


__all__ = ["Texts", "encoder", "equal", "learn", "made", "resolve", "stream", "tested"]
