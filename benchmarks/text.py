"""What encoding texts once saves: sampled WebNLP S2, ExSSNeT, 2 + 2 epochs, in one process.

    python benchmarks/text.py --encoder PATH [--sample 2000] [--json FILE]
    python benchmarks/text.py --small        # made-up texts and a random transformer, to see that it runs

Three ways to the same masks: every epoch and every test encodes its texts; texts are encoded once into an empty cache
(cold); the cache has them (warm). All three show the same batches of like lengths, and hold out nothing. Times are from
the texts in memory to the last test, with the reading and verifying of the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exssnet import encoders
from exssnet.cli.console import one_line_errors
from exssnet.data.benchmarks.text import text_tasks
from exssnet.data.tasks import Task
from exssnet.data.text.states import StatesData
from exssnet.data.text.stream import TextTask
from exssnet.data.text.texts import Texts, some
from exssnet.encoders import Encoder, States
from exssnet.encoders.states import SHARD, StateCache
from exssnet.engine.cpu.engine import CpuEngine
from exssnet.experiments.environment import device_name, versions
from exssnet.methods.masks.exssnet import ExSSNeT
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.models import build
from exssnet.train import Trainer, TrainSettings, accuracy

CACHE_GB = 10**12


class EncodedEveryTime(StatesData):
    """Encodes the texts of a batch whenever it is asked for; knows their lengths beforehand."""

    def __init__(self, encoder: Encoder, texts: Texts, states: States, classes: int) -> None:
        super().__init__(states, torch.arange(len(texts)), texts.labels, classes, encoder.limit)
        self._encoder, self._texts = encoder, texts.texts

    def batch(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        found = self._encoder.encode([self._texts[row] for row in self._rows[index].tolist()]).states
        x = torch.zeros(len(index), max(1, *map(len, found)), self.shape[1])
        for place, states in enumerate(found):
            x[place, : len(states), :-1] = torch.from_numpy(states)
            x[place, : len(states), -1] = 1
        return x, self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", help="name or path")
    parser.add_argument("--sample", type=int, default=2000, help="training rows a class")
    parser.add_argument("--tests", type=int, default=7600, help="test rows a task, at most")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--small", action="store_true", help="made-up texts and a small random transformer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if options.small:
            here = find_spec("transformers") is not None
            tasks, path = made_up_tasks(), small_transformer(Path(scratch) / "model") if here else "random:128"
        elif options.encoder:
            names = ("ag", "yelp", "amazon", "yahoo", "dbpedia")[: options.tasks]
            tasks = [capped(task, options.tests) for task in text_tasks(names, options.sample, 0.0)]
            path = options.encoder
        else:
            parser.error("--encoder or --small is needed")
        found = measure(tasks, path, Path(scratch) / "states", options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(tasks: list[TextTask], path: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the three ways, and what came of each."""
    cold, cold_encoded, first = learned(tasks, once(path, folder), options)
    warm, warm_encoded, second = learned(tasks, once(path, folder), options)
    every, _, third = learned(tasks, every_time(path, folder), options)
    texts = sum(len(task.train) + len(task.test) for task in tasks)
    tokens = float(torch.tensor(StateCache(folder, CACHE_GB).states(encoders.load(path), tasks[0].train.texts).lengths)
                   .float().mean())  # fmt: skip
    return {
        "tasks": [task.name for task in tasks],
        "texts": texts,
        "tokens of a text of the first task": round(tokens, 1),
        "encoder": path,
        "seconds": {"cold": cold, "warm": warm, "every epoch": every},
        "encoded": {"cold": cold_encoded, "warm": warm_encoded},
        "accuracies": {"cold": first, "warm": second, "every epoch": third},
        "ratios": {"every epoch / cold": every / cold, "every epoch / warm": every / warm},
        "device": device_name("cpu"),
        "versions": versions(),
    }


Data = Callable[[Texts, int], tuple[StatesData, int]]  # examples of some texts, and how many were encoded for them


def once(path: str, folder: Path) -> Data:
    """As a run has it: through the cache, with an encoder that has not been loaded."""
    cache, encoder = StateCache(folder, CACHE_GB), encoders.load(path)

    def data(texts: Texts, classes: int) -> tuple[StatesData, int]:
        states = cache.states(encoder, texts.texts)
        rows = torch.arange(len(texts))
        return StatesData(states, rows, texts.labels, classes, encoder.limit), states.encoded

    return data


def every_time(path: str, folder: Path) -> Data:
    """Without a cache, which only tells lengths."""
    cache, encoder = StateCache(folder, CACHE_GB), encoders.load(path)

    def data(texts: Texts, classes: int) -> tuple[StatesData, int]:
        return EncodedEveryTime(encoder, texts, cache.states(encoder, texts.texts), classes), 0

    return data


def learned(tasks: list[TextTask], data: Data, options: argparse.Namespace) -> tuple[float, int, list[float]]:
    """Learn all tasks: seconds, texts that were encoded beforehand, and the accuracies at the end."""
    started, encoded = time.perf_counter(), 0
    method: ExSSNeT | None = None
    settings = MaskSettings(mask_epochs=2, weight_epochs=2, lr=0.01, weight_lr=0.001)
    tests: dict[str, StatesData] = {}
    for index, one in enumerate(tasks):
        train, new = data(one.train, len(one.class_names))
        tests[one.name], more = data(one.test, len(one.class_names))
        encoded += new + more
        if method is None:
            torch.manual_seed(0)
            method = ExSSNeT(build("text-cnn", train.shape, max(len(task.class_names) for task in tasks)), settings, 0)
            method.use(CpuEngine())
            trainer = Trainer(method, 0, TrainSettings(options.batch_size))
        trainer.learn(Task(index, one.name, one.numbers, train, tests[one.name]))
        found = accuracy(partial(method.logits, task=one.name), tests[one.name])
        print(f"{time.perf_counter() - started:8.1f} s  {one.name} {found:.2f} %", flush=True)
    assert method is not None
    accuracies = [accuracy(partial(method.logits, task=name), test) for name, test in tests.items()]
    return time.perf_counter() - started, encoded, accuracies


def capped(task: TextTask, most: int) -> TextTask:
    return TextTask(task.name, task.class_names, task.numbers, task.train, some(task.test, most, task.name))


def made_up_tasks() -> list[TextTask]:
    """Two tasks of 60 and 30 texts, whose first word tells the class."""
    draw = random.Random(0)
    words = [f"word{at}" for at in range(50)]

    def texts(count: int) -> Texts:
        rows = [" ".join([words[at % 2], *draw.choices(words[2:], k=draw.randint(3, 30))]) for at in range(count)]
        return Texts(rows, torch.arange(count) % 2)

    return [TextTask(f"made-up {at}", ("a", "b"), (0, 1), texts(60), texts(30)) for at in range(2)]


def small_transformer(folder: Path) -> str:
    """Four layers of 128 with random weights."""
    from exssnet.encoders.transformer import transformers

    library = transformers()
    library.utils.logging.disable_progress_bar()
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "[PAD]": 1} | {f"word{at}": at + 2 for at in range(50)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    library.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    config = library.BertConfig(
        vocab_size=len(vocabulary), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512
    )
    torch.manual_seed(0)
    library.AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)


def show(found: dict[str, Any]) -> None:
    seconds, ratios = found["seconds"], found["ratios"]
    print(f"{found['texts']:,} texts in shards of {SHARD}, on {found['device']}")
    for name, value in seconds.items():
        shown = ", ".join(f"{one:.1f}" for one in found["accuracies"][name])
        print(f"{name:12} {value:8.1f} s   accuracies {shown} %")
    print(f"every epoch / cold {ratios['every epoch / cold']:.1f} ×, / warm {ratios['every epoch / warm']:.1f} ×")


if __name__ == "__main__":
    with one_line_errors():
        main()
