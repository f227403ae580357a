"""Whole runs of methods that train an encoder, on a user's own texts and a folder of a tiny transformer."""

import json

import pytest
from tests.parts import need

need("transformers", "needs the package transformers (pip install 'exssnet[text]')")
need("tokenizers", "needs the package tokenizers (pip install 'exssnet[text]')")

from tests.encoders import tiny  # noqa: E402
from tests.methods.text.streams import WORDS  # noqa: E402

from exssnet.errors import InputError  # noqa: E402
from exssnet.experiments.config import resolve  # noqa: E402
from exssnet.experiments.run import run  # noqa: E402
from exssnet.methods import methods  # noqa: E402
from exssnet.methods.text._base import AllClasses  # noqa: E402

from . import own_streams  # noqa: E402

FEW = ("--epochs", "2", "--batch-size", "8", "--lr", "0.01")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("bert"), positions=96, words=WORDS)


@pytest.mark.parametrize("name", ["fine-tune", "replay", "multi-adapter"])
def test_a_run_from_the_command_line_leaves_a_record(exssnet, tmp_path, encoder, name):
    file = own_streams.text_stream(tmp_path, count=20)
    done = exssnet("run", "--stream", file, "--encoder", encoder, "--method", name, *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "texts: 80, of which 0 were cut and 0 are empty" in done.stdout
    record = json.loads((tmp_path / "runs" / "mine" / name / "seed-0" / "results.json").read_text())
    assert [len(row) for row in record["accuracy_matrix"]] == [2, 2]
    assert record["epochs"] == 2
    assert record["config"]["encoder"] == str(encoder)
    assert record["config"]["optimizer"] == "adamw"
    assert record["storage"]["weight_bits"] > 0
    assert (record["zero_forgetting"] is not None) == (name == "multi-adapter")
    if name == "multi-adapter":
        assert record["zero_forgetting"]["verified"]
        assert record["forgetting"] == 0


@pytest.mark.parametrize("name", [name for name, kind in methods().items() if kind.trains_encoder])
@pytest.mark.parametrize("setting", ["task-incremental", "class-incremental"])
def test_every_method_makes_a_run_in_the_settings_it_can_do(tmp_path, encoder, name, setting):
    if name == "lamol":
        encoder = tiny.make(tmp_path / "gpt2", "gpt2", positions=96, words=WORDS)
    if setting == "class-incremental" and not issubclass(methods()[name], AllClasses):
        return
    few = {"lamol": {"longest": 20}, "prompt-tuning": {"prompts": 5}, "mbpa++": {"steps": 2}}.get(name, {})
    file = own_streams.text_stream(tmp_path, count=12)
    config = resolve(str(file), name, 0, encoder=str(encoder), epochs=1, lr=0.003, setting=setting, **few)
    record = run(config, tmp_path / "runs")
    assert record["setting"] == setting
    assert len(record["accuracy_matrix"][-1]) == 2
    assert all(0 <= accuracy <= 100 for accuracy in record["accuracy_matrix"][-1])
    assert sum(split["texts"] for split in record["texts"].values()) == 48
    assert (record["zero_forgetting"] is not None) == methods()[name].exclusive


def test_class_incremental_answers_among_the_classes_of_all_tasks(tmp_path, encoder):
    """What is learned is the same; told the task, a text is right at least as often."""
    file = own_streams.text_stream(tmp_path, count=20)
    records = [
        run(resolve(str(file), "fine-tune", 0, encoder=str(encoder), epochs=2, lr=0.01, setting=s), tmp_path / s)
        for s in ("task-incremental", "class-incremental")
    ]
    told, asked = (record["accuracy_matrix"] for record in records)
    assert asked[0][0] <= told[0][0]
    assert asked[1][0] < 20  # forgotten: all is answered with the new task's classes
    assert told[1][0] > asked[1][0]
    assert records[1]["task_identification"] is None


def test_an_encoder_that_is_no_transformer_is_refused(tmp_path):
    file = own_streams.text_stream(tmp_path, count=6)
    with pytest.raises(
        InputError, match="method 'fine-tune' trains a transformer, and encoder 'random:8:0' is not one"
    ):
        run(resolve(str(file), "fine-tune", 0, encoder="random:8"), tmp_path / "runs")
