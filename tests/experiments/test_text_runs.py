"""Runs on texts and on streams of a user's own: what they learn, what their records say, what is refused."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from exssnet.encoders import states
from exssnet.encoders.words import RandomEncoder
from exssnet.errors import ExssnetError, InputError
from exssnet.experiments import recipes
from exssnet.experiments.compare import compare, read
from exssnet.experiments.config import RunConfig, resolve
from exssnet.experiments.run import run
from exssnet.methods import methods

from . import own_streams

QUICK = {"encoder": "random:32", "width": 20.0, "batch_size": 8}


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch, tmp_path):
    """Every test reads its own files and has its own cache."""
    recipes._of_files.cache_clear()
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path / "cache"))
    yield
    recipes._of_files.cache_clear()


def learn(file: Path | str, out: Path, method: str = "exssnet+kkt", **changes):
    return run(resolve(str(file), method, changes.pop("seed", 0), **changes), out)


def test_a_stream_of_own_texts_is_learned_and_nothing_is_forgotten(tmp_path):
    file = own_streams.text_stream(tmp_path)
    record = learn(file, tmp_path / "runs", **QUICK)
    assert record["benchmark"] == "mine"
    assert record["average_accuracy"] > 85
    assert record["forgetting"] == 0
    assert record["zero_forgetting"]["verified"]
    assert record["class_order"] == [[0, 1], [2, 3]]
    assert record["texts"]["task-0 train"]["texts"] + record["texts"]["task-0 test"]["texts"] == 80
    assert record["data_digests"]["encoder"].endswith("(random:32:0)")
    assert not record["sample"]


@pytest.mark.parametrize(
    ("stream", "network"), [(own_streams.table_stream, None), (own_streams.image_stream, "lenet-300-100")]
)
def test_streams_of_own_tables_and_images_are_learned(tmp_path, stream, network):
    record = learn(stream(tmp_path), tmp_path / "runs", "exssnet", epochs=6, batch_size=16, network=network)
    assert record["average_accuracy"] > 85
    assert record["texts"] is None
    assert record["zero_forgetting"]["verified"]


@pytest.mark.parametrize("method", ["supsup", "ssnet", "piggyback", "naive", "er", "ewc-online", "hat", "cgate"])
def test_other_methods_learn_the_same_texts(tmp_path, method):
    """Masks, a plain network, a memory of examples, a Fisher information of a layer it does not know, and gates."""
    record = learn(own_streams.text_stream(tmp_path), tmp_path / "runs", method, **QUICK)
    assert record["accuracy_matrix"][0][0] > 75
    assert record["accuracy_matrix"][1][1] > 75


@pytest.mark.parametrize("method", ["individual", "multitask"])
def test_the_bounds_over_a_frozen_encoder_learn_the_same_texts(tmp_path, method):
    record = learn(own_streams.text_stream(tmp_path), tmp_path / "runs", method, **QUICK)
    assert min(record["accuracy_matrix"][-1]) > 75


def test_the_same_seed_gives_the_same_run_and_the_cache_no_difference(tmp_path):
    file = own_streams.text_stream(tmp_path)
    first = learn(file, tmp_path / "one", **QUICK)
    recipes._of_files.cache_clear()
    again = learn(file, tmp_path / "two", **QUICK)
    same = ("accuracy_matrix", "zero_forgetting", "transfer", "data_digests", "texts")
    assert all(first[name] == again[name] for name in same)


def test_an_interrupted_run_goes_on_to_the_same_record(tmp_path):
    from exssnet.train import Listener

    class Stopping(Listener):
        def task_started(self, index, name):
            if index == 1:
                raise KeyboardInterrupt

    file = own_streams.text_stream(tmp_path)
    whole = learn(file, tmp_path / "whole", **QUICK)
    config = resolve(str(file), "exssnet+kkt", 0, **QUICK)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "halves", Stopping(), checkpoint_seconds=0)
    recipes._of_files.cache_clear()
    record = run(config, tmp_path / "halves", checkpoint_seconds=0)
    assert record["zero_forgetting"] == whole["zero_forgetting"]
    assert record["texts"] == whole["texts"]


def test_methods_and_seeds_share_what_was_encoded(tmp_path, monkeypatch):
    encoded = []
    encode = RandomEncoder.encode
    monkeypatch.setattr(RandomEncoder, "encode", lambda self, texts: encoded.append(len(texts)) or encode(self, texts))
    file = own_streams.text_stream(tmp_path)
    changes = QUICK | {"encoder": "random:32:5"}  # its own seed, not the run's
    for seed, method in ((0, "exssnet"), (1, "supsup"), (2, "exssnet+kkt")):
        recipes._of_files.cache_clear()
        learn(file, tmp_path / "runs", method, seed=seed, **changes)
    assert sum(encoded) == 160
    assert states.state_cache().kept()[0].texts == 160


def test_without_a_name_of_its_own_a_random_embedding_follows_the_seed(tmp_path):
    file = own_streams.text_stream(tmp_path)
    records = [learn(file, tmp_path / "runs", "supsup", seed=seed, epochs=1, **QUICK) for seed in (0, 1)]
    assert [record["data_digests"]["encoder"][-13:] for record in records] == ["(random:32:0)", "(random:32:1)"]


# --- settings ------------------------------------------------------------------------------------------------------


def test_class_incremental_finds_the_task_and_answers_among_all_classes(tmp_path):
    """The rule by hand: the task whose output is surest, then its largest logit."""
    from exssnet.experiments.prepare import prepare
    from exssnet.train import Trainer, TrainSettings

    file = own_streams.text_stream(tmp_path)
    record = learn(file, tmp_path / "runs", "exssnet", setting="class-incremental", **QUICK)
    assert record["setting"] == "class-incremental"
    config = resolve(str(file), "exssnet", 0, **QUICK)
    stream, method = prepare(config)
    for task in stream:
        Trainer(method, 0, TrainSettings(8)).learn(task)
    for index, task in enumerate(stream):
        right = found = 0
        for row in range(len(task.test)):
            x, y = task.test.batch(torch.tensor([row]))
            outputs = [method.logits(x, name.name)[0].softmax(0) for name in stream]
            entropy = [float(-(p * p.clamp_min(1e-30).log()).sum()) for p in outputs]
            chosen = entropy.index(min(entropy))
            found += chosen == index
            right += stream.class_order[chosen][int(outputs[chosen].argmax())] == task.classes[int(y)]
        assert record["accuracy_matrix"][-1][index] == pytest.approx(100 * right / len(task.test))
        assert record["task_identification"][index] == pytest.approx(100 * found / len(task.test))
    told = learn(file, tmp_path / "told", "exssnet", **QUICK)
    assert told["task_identification"] is None
    assert record["average_accuracy"] <= told["average_accuracy"]


def test_classes_that_two_tasks_share_count_for_both(tmp_path):
    file = own_streams.text_stream(tmp_path, tasks=(("sport", "food"), ("sport", "food")))
    content = yaml.safe_load(file.read_text()) | {"classes": "shared"}
    own_streams.write(file, content)
    record = learn(file, tmp_path / "runs", "exssnet", setting="class-incremental", **QUICK)
    assert record["class_order"] == [[0, 1], [0, 1]]
    assert record["average_accuracy"] > 80  # whichever of the two tasks answers
    assert sum(record["task_identification"]) < 160


def test_settings_are_never_averaged_together(tmp_path):
    file = own_streams.text_stream(tmp_path)
    for setting in ("task-incremental", "class-incremental"):
        learn(file, tmp_path / setting, "supsup", epochs=1, setting=setting, **QUICK)
    rows = compare(read([tmp_path]))
    assert sorted(row.differs for row in rows) == [("setting=class-incremental",), ("setting=task-incremental",)]


# --- benchmarks ----------------------------------------------------------------------------------------------------


def test_a_sample_of_webnlp_is_called_one_in_the_record_and_in_tables(mirror, tmp_path):
    if not (mirror / "Yelp").is_dir():
        pytest.skip("set EXSSNET_DATA to a folder with the text data sets in the hub's parquet layout")
    from exssnet.cli.compare_tables import FORMATS

    record = learn("webnlp-s7", tmp_path / "runs", sample=10, tasks=2, validation=0.0, epochs=2, **QUICK)
    assert record["sample"]
    assert "sample" in record["data_digests"]["yelp test"]
    rows = compare(read([tmp_path / "runs"]))
    assert rows[0].title.startswith("webnlp-s7")
    assert "(sample)" in rows[0].title
    assert rows[0].published is None
    assert all("(sample)" in write(rows) for name, write in FORMATS.items() if name != "csv")


def test_the_recipes_are_the_papers_settings():
    for benchmark in ("webnlp-s2", "glue-s1"):
        for method in ("supsup", "ssnet", "exssnet", "exssnet+kkt"):
            config = resolve(benchmark, method, 0, encoder="random")
            total = config.settings["mask_epochs"] + (method != "supsup") * config.settings["weight_epochs"]
            assert (total, config.optimizer, config.schedule) == (4, "adam", "cosine")
            assert config.settings["lr"] in (0.01, 0.001, 0.0001)
            assert config.network == "text-cnn"
    assert resolve("webnlp-s6", "exssnet", 0, encoder="random").tasks == 3


def test_without_transformers_and_a_hub_the_encoder_is_the_random_embedding(monkeypatch):
    from exssnet.encoders import found

    found.automatic.cache_clear()
    monkeypatch.setattr(found, "find_spec", lambda name: None)
    assert resolve("webnlp-s2", "exssnet", 0).encoder == "random"
    found.automatic.cache_clear()


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("benchmark", "changes", "says"),
    [
        ("split-digits", {"encoder": "random"}, "no texts"),
        ("split-digits", {"sample": 5}, "--samples-per-class"),
        ("webnlp-s2", {"samples_per_class": 5}, "--sample"),
        ("webnlp-s2", {"sample": 0}, "sample is 0"),
        ("webnlp-s2", {"class_order": "seed"}, "fixed tasks"),
        ("webnlp-s2", {"setting": "class"}, "choose one of task-incremental, class-incremental"),
        ("webnlp-s2", {"routing": "loudest"}, "choose one of confident"),
    ],
)
def test_settings_that_do_not_fit_are_refused(benchmark, changes, says):
    with pytest.raises(InputError, match=says):
        resolve(benchmark, "exssnet", 0, **({"encoder": "random"} if benchmark != "split-digits" else {}) | changes)


def test_class_incremental_needs_masks():
    with pytest.raises(InputError, match="masks"):
        resolve("webnlp-s2", "naive", 0, encoder="random", setting="class-incremental")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "object"),
        ("tasks: []", "tasks"),
        ("tasks: [{name: a, train: a.csv, text: body}]", "no label column"),
        ("tasks: [{name: a, train: a.csv, text: body, pair: [a, b], label: l}]", "both text and pair"),
        (
            "tasks: [{name: a, train: a.csv, text: b, label: l}, {name: a, train: a.csv, text: b, label: l}]",
            "two tasks",
        ),
        ("tasks: [{name: a, train: a.csv, text: b, label: l}, {name: b, train: a.csv, label: l}]", "one kind"),
        ("tasks: [{name: ../a, train: a.csv, text: b, label: l}]", "name"),
        ("tasks: [{name: a, train: a.csv, txt: b, label: l}]", "txt"),
        ("name: split-mnist\ntasks: [{name: a, train: a.csv, text: b, label: l}]", "name of a benchmark"),
        ("tasks: [{name: a, train: a.csv, text: b, label: l, test: 1.5}]", "test"),
        ("{", "YAML"),
    ],
)
def test_a_stream_file_that_makes_no_sense_is_refused_in_a_line(tmp_path, content, says):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ExssnetError, match=says) as refused:
        resolve(str(file), "exssnet", 0)
    assert "\n" not in str(refused.value)


def test_what_is_wrong_with_the_data_is_said_before_anything_is_written(tmp_path):
    file = own_streams.text_stream(tmp_path, text="boody")
    with pytest.raises(ExssnetError, match="no column 'boody'"):
        learn(file, tmp_path / "runs", **QUICK)
    assert not (tmp_path / "runs").exists()
    file = own_streams.text_stream(tmp_path)
    (tmp_path / "task-1.jsonl").write_text("")
    with pytest.raises(ExssnetError, match="has no rows"):
        learn(file, tmp_path / "runs", **QUICK)
    with pytest.raises(ExssnetError, match=r"--encoder random"):
        learn(own_streams.text_stream(tmp_path), tmp_path / "runs", **QUICK | {"encoder": "nowhere"})
    with pytest.raises(ExssnetError, match=r"config\.json"):
        learn(own_streams.text_stream(tmp_path), tmp_path / "runs", **QUICK | {"encoder": str(tmp_path)})
    assert not (tmp_path / "runs").exists()


def test_a_configuration_of_an_own_stream_is_read_back_as_it_was(tmp_path):
    config = resolve(str(own_streams.text_stream(tmp_path)), "exssnet+kkt", 3, **QUICK)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert RunConfig.read(tmp_path / "config.yaml") == config


def test_a_label_of_the_test_file_outside_the_classes_is_refused(tmp_path):
    file = own_streams.text_stream(tmp_path)
    (tmp_path / "test.jsonl").write_text(json.dumps({"body": "a", "team": "nobody"}) + "\n")
    content = yaml.safe_load(file.read_text())
    content["tasks"][0]["test"] = "test.jsonl"
    own_streams.write(file, content)
    with pytest.raises(ExssnetError, match="label 'nobody' is not one of"):
        learn(file, tmp_path / "runs", **QUICK)


def test_every_mask_method_takes_the_setting():
    for name, kind in methods().items():
        if hasattr(kind, "network") or name in ("supsup", "ssnet", "exssnet", "packnet", "wsn", "piggyback"):
            assert resolve("webnlp-s2", name, 0, encoder="random", setting="class-incremental").setting


@pytest.mark.gpu
def test_texts_are_learned_by_captured_steps_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    record = learn(own_streams.text_stream(tmp_path), tmp_path / "runs", device="cuda", **QUICK)
    assert record["average_accuracy"] > 85
    assert record["zero_forgetting"]["verified"]
