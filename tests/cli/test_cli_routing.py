"""`--task auto` as a user meets it: what learning says of it, and what is answered where tasks cannot be told apart."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from tests.forks import Forks
from tests.store.small import X
from tests.store.test_golden import GOLDEN


def test_two_tasks_of_the_same_inputs_are_warned_of_and_unknown(exssnet: Forks, tmp_path: Path):
    x, y = load_digits(return_X_y=True)
    x, y = x[y < 2].astype(np.float32), y[y < 2]
    np.savez(tmp_path / "one.npz", x=x, y=y)
    np.savez(tmp_path / "other.npz", x=x, y=1 - y)
    learned = [
        exssnet("learn", "model", "--task", name, "--data", f"{name}.npz", "--epochs", "10", cwd=tmp_path)
        for name in ("one", "other")
    ]
    assert learned[0].said == ""
    warned = re.fullmatch(
        r"exssnet: of 36 held-out inputs of '(one|other)' (\d+) are routed to '(one|other)'"
        r"( \(and 1 more such pairs\))?: --task auto is unreliable for these tasks\n",
        learned[1].said,
    )
    assert warned is not None
    assert warned[1] != warned[3]
    assert int(warned[2]) > 36 * 0.15

    done = exssnet("predict", "model", "one.npz", "--task", "auto", cwd=tmp_path)
    assert (done.returncode, done.said) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert np.mean([row[1] == "unknown" for row in rows]) > 0.9
    answers = json.loads(exssnet("predict", "model", "one.npz", "--task", "one", "--json", cwd=tmp_path).stdout)
    assert np.mean([answer["probability"] for answer in answers]) > 0.9  # each task is sure of its class
    shown = json.loads(exssnet("show", "model", cwd=tmp_path).stdout)["routing"]
    assert shown == json.loads(exssnet("show", "model", "--task", "other", cwd=tmp_path).stdout)["routing"]
    counts = shown["found"][warned[1]]
    assert [sum(counts), counts[shown["tasks"].index(warned[3])]] == [36, int(warned[2])]


def test_a_model_that_was_never_measured_answers_and_says_so(exssnet: Forks, tmp_path: Path):
    shutil.copytree(GOLDEN / "built-in", tmp_path / "model")
    np.save(tmp_path / "x.npy", X.numpy())
    done = exssnet("predict", "model", "x.npy", "--task", "auto", cwd=tmp_path)
    assert done.said == (
        "exssnet: routing was not measured in this model, so --task auto never answers unknown; "
        "`exssnet learn` measures it for each new task\n"
    )
    rows = done.stdout.splitlines()[1:]
    assert len(rows) == 9
    assert all(" – " in row and "unknown" not in row for row in rows)  # an answer without a probability of its task
