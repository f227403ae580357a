"""A directory is learned with methods that leave earlier tasks as they were, and with no others."""

import re
from pathlib import Path

import pytest
from tests.forks import Forks
from tests.store.small import X, content, create, examples, learn
from tests.store.tamper import rewrite

from exssnet import InputError, Model
from exssnet.methods import methods
from exssnet.train import Listener

HOLDING = ("exssnet", "exssnet+kkt", "supsup", "supsup+kkt")


class NeverCalled(Listener):
    def task_started(self, index: int, name: str) -> None:
        pytest.fail("training has begun")


@pytest.mark.parametrize("method", ["ssnet", "ssnet+kkt", "er", "packnet"])
def test_a_method_that_a_directory_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, method: str):
    with pytest.raises(InputError, match=re.escape(f"method '{method}' cannot be stored")) as error:
        create(tmp_path / "model", method=method)
    assert str(error.value).endswith("choose one of exssnet+kkt, exssnet, supsup+kkt, supsup")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", HOLDING)
def test_the_methods_that_are_offered_keep_the_directory_whole(tmp_path: Path, method: str):
    model = create(tmp_path / "model", method=method)
    for number, name in enumerate("ab"):
        learn(model, name, number)
    assert model.verify().verified


def test_every_method_is_held_or_refused(tmp_path: Path):
    for name in methods():
        if name in HOLDING:
            create(tmp_path / name, method=name)
        else:
            with pytest.raises(InputError, match="choose one of"):
                create(tmp_path / name, method=name)


def test_a_directory_that_an_earlier_version_made_with_ssnet_answers_and_learns_no_more(tmp_path: Path):
    model = create(tmp_path / "model")
    learn(model, "a", 0)
    wanted = model.predict(X, "a")
    rewrite(tmp_path / "model", lambda found: found["base"].update(method="ssnet"))
    before, opened = content(tmp_path / "model"), Model.open(tmp_path / "model")
    with pytest.raises(InputError, match="method 'ssnet' cannot be stored"):
        opened.learn("b", examples(1), listener=NeverCalled())
    assert content(tmp_path / "model") == before
    assert opened.predict(X, "a").equal(wanted)


def test_the_command_line_refuses_it_in_a_line_before_it_reads_anything(tmp_path: Path):
    forks = Forks()
    done = forks("learn", tmp_path / "model", "--task", "a", "--data", tmp_path / "missing", "--method", "ssnet")
    forks.close()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("exssnet: method 'ssnet' cannot be stored")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
