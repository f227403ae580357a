"""Short runs of the methods that give a task weights of its own, for several test files."""

import pytest

from exssnet.experiments.config import knows, resolve
from exssnet.methods import parse

SHORT = {"tasks": 3, "epochs": 6, "retrain_epochs": 4, "head": "shared", "device": "cpu"}


every_head = pytest.mark.parametrize("head", ["shared", "task"])


def config(name, **changes):
    kind = parse(name)[0]
    fitting = {n: v for n, v in (SHORT | changes).items() if n not in ("epochs", "retrain_epochs") or knows(kind, n)}
    return resolve("split-digits", name, 0, **fitting)


def outcome(record):
    return {key: value for key, value in record.items() if key != "seconds"}


def layers(network, vector):
    return list(network.layout.tensors(vector).values())
