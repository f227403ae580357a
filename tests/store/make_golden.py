"""Make the directories of format 1 that every later version must read: tests/store/golden/.

    python -m tests.store.make_golden FOLDER

They were made once and are committed. Making them again would hide that the format has changed: a new format gets
directories of its own beside these. `answers.json` holds what the tasks answered when they were learned.
"""

import json
import sys
from pathlib import Path

import torch
from tests.store.small import Own, X, create, learn

from exssnet import Model
from exssnet.store.stored_model import StoredModel


def own_network() -> Own:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Own()


def answers(model: StoredModel) -> dict[str, list[list[float]]]:
    return {task.name: model.probabilities(X, task.name).tolist() for task in model.tasks}


def make(folder: Path) -> None:
    built_in = create(folder / "built-in", method="exssnet+kkt")
    for number, name in enumerate(("a", "b", "c")):
        learn(built_in, name, number, classes=2 + number, epochs=(3, 3))
    built_in.remove("b")
    elsewhere = create(folder.parent / "elsewhere", method="exssnet+kkt")
    for number, name in enumerate(("x", "y")):
        learn(elsewhere, name, 10 + number, epochs=(3, 3))
    built_in.import_task(elsewhere, "y", "imported")
    built_in.rename("c", "a name with ünïcode")
    own = Model.create(folder / "own", own_network(), input=(12,), density=0.2)
    for number, name in enumerate(("a", "b", "c")):
        learn(own, name, number, epochs=(3, 3))
    own.rollback()
    found = {place: answers(model) for place, model in (("built-in", built_in), ("own", own))}
    (folder / "answers.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
