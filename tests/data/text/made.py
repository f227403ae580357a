"""Small made-up texts whose words tell their classes."""

import random
from collections.abc import Sequence

import torch

from exssnet.data.text.texts import Texts

TOPICS = {
    "sport": "goal match team player score league coach win",
    "food": "bread soup cheese cook plate salt taste oven",
    "space": "planet star orbit rocket moon comet sky launch",
}
FILLER = "the a of in on with and for it was".split()  # noqa: SIM905


def texts_of(topics: Sequence[str], count: int, seed: int = 0, longest: int = 12) -> Texts:
    """As many texts of each topic, of 1 to `longest` words, and labels in the order of the topics."""
    draw = random.Random(seed)
    found, labels = [], []
    for at in range(count * len(topics)):
        label = at % len(topics)
        words = TOPICS[topics[label]].split()
        length = draw.randint(1, longest)
        chosen = [draw.choice(words) if draw.random() < 0.6 else draw.choice(FILLER) for _ in range(length)]
        found.append(" ".join([draw.choice(words), *chosen[1:]]))
        labels.append(label)
    return Texts(found, torch.tensor(labels))
