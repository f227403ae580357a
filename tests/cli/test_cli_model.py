"""The verbs for a model directory as a user meets them: processes of their own, on real data of every kind."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_wine
from tests.forks import Done, Forks
from tests.parts import need
from tests.store.small import content
from tests.user_files import DIGITS, NETWORK, bomb, csv_file, hub_rows, names, picture_folder

from exssnet import Model
from exssnet.cli.model_display import bytes_

SMALL = ("--network", "lenet-300-100", "--width", "0.3")
QUICK = ("--epochs", "16")


def good(done: Done) -> str:
    """What a command printed that went well, and said nothing else, but for tasks that are hard to tell apart."""
    routed = r"exssnet: of \d+ held-out inputs of '.*' \d+ are routed to '.*?'(?: \(and .*\))?"
    confused = rf"{routed}: --task auto is unreliable for these tasks\n"
    assert (done.returncode, re.sub(confused, "", done.said)) == (0, ""), done.stderr
    return done.stdout


def told(done: Done) -> object:
    return json.loads(good(done))


def refused(done: Done, said: str) -> None:
    """One line, no traceback, exit code 2."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert re.fullmatch(rf"exssnet: [^\n]*{said}[^\n]*\n", done.said), done.stderr


def test_a_model_of_image_folders_through_its_whole_life(exssnet: Forks, tmp_path: Path):
    def run(*arguments: object) -> Done:
        return exssnet(*arguments, cwd=tmp_path)

    picture_folder(tmp_path / "low", (0, 1, 2))
    picture_folder(tmp_path / "high", (7, 8, 9))
    printed = good(run("learn", "model", "--task", "low", "--data", "low", "--input", "1,8,8", *SMALL, *QUICK))
    assert re.fullmatch(
        r"learned low: 3 classes, 162 examples, accuracy [\d.]+ % on 18 held out\n"
        r"[\d,]+ weights trained; 90\.0 % of all weights are free\n"
        r"[\d.]+ kB on disk, digest [0-9a-f]{16}\n",
        printed,
    )
    again = ("--input", "1,8,8", *SMALL, "--method", "exssnet+kkt", "--seed", "0", "--init", "hashed")  # what it has
    high = told(run("learn", "model", "--task", "high", "--data", "high", *QUICK, *again, "--json"))
    assert (high["name"], high["labels"], high["lender"]) == ("high", ["digit-7", "digit-8", "digit-9"], "low")
    assert high["accuracy"] > 80

    table = good(run("tasks", "model")).splitlines()
    assert " ".join(table[0].split()) == "task classes accuracy % auto % lender overlap % trained size date"
    assert [row.split()[0] for row in table[1:3]] == ["low", "high"]
    assert re.fullmatch(r"2 tasks on lenet-300-100, [\d.]+ kB in all", table[3])
    listed = told(run("tasks", "model", "--json"))
    assert listed[1]["digest"] == high["digest"]
    own = {task: counts[at] / sum(counts) for at, (task, counts) in
           enumerate(sorted(high["routing"]["found"].items(), key=lambda pair: pair[0] == "high"))}  # fmt: skip
    assert {task["name"]: task["auto"] for task in listed} == own

    asked = sorted((tmp_path / "low").rglob("*.png"))[::7]
    answers = told(run("predict", "model", *asked, "--task", "low", "--json"))
    right = [answer["label"] == file.parent.name for answer, file in zip(answers, asked, strict=True)]
    assert np.mean(right) > 0.9
    for answer in answers:
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert (
            answer["probability"] == max(answer["probabilities"].values()) == answer["probabilities"][answer["label"]]
        )
    shown = good(run("predict", "model", asked[0], "--task", "low")).splitlines()
    assert shown[0].split() == ["input", "label", "probability", "next"]
    assert shown[1].split()[:2] == [asked[0].name, answers[0]["label"]]

    (found,) = told(run("evaluate", "model", "--task", "low", "--data", "low", "--json"))
    assert (found["task"], found["examples"]) == ("low", 180)
    assert found["accuracy"] > 90
    assert good(run("evaluate", "model", "--task", "low", "--data", "low")).split()[-1] == f"{found['accuracy']:.2f}"

    both = ("--data", "low=low", "--data", "high=high")
    shares = {}
    for rule in ("confident", "one-shot", "binary"):
        rows = told(run("evaluate", "model", "--task", "auto", *both, "--rule", rule, "--json"))
        assert [row["task"] for row in rows] == ["low", "high", None]
        assert rows[2]["task_accuracy"] == pytest.approx((rows[0]["task_accuracy"] + rows[1]["task_accuracy"]) / 2)
        assert all(row["accuracy"] <= row["task_accuracy"] for row in rows)
        shares[rule] = rows[2]["task_accuracy"]
    assert shares["confident"] > 75
    table = good(run("evaluate", "model", "--task", "auto", *both)).splitlines()
    assert table[0].split()[:7] == ["task", "examples", "task", "found", "%", "accuracy", "%"]
    assert table[0].endswith("accuracy %  unknown %  accuracy of the rest %")
    assert table[3].split()[:3] == ["all", "360", f"{shares['confident']:.2f}"]
    routed = told(run("predict", "model", *asked, "--task", "auto", "--threshold", "0", "--json"))
    assert np.mean([answer["task"] == "low" for answer in routed]) > 0.6
    rows = told(run("predict", "model", *asked, "--task", "auto", "--threshold", "0.9", "--json"))
    assert {answer["routing"] < 0.9 for answer in rows} == {True, False}
    for sure, answer in zip(routed, rows, strict=True):
        assert sum(answer["candidates"].values()) == pytest.approx(1)
        assert answer["routing"] == max(answer["candidates"].values())
        assert answer["likeliest"]["probabilities"] == sure["probabilities"]
        known = answer["routing"] >= 0.9
        assert [answer[key] for key in ("task", "label", "probability")] == (
            [sure[key] for key in ("task", "label", "probability")] if known else [None] * 3
        )
    lines = good(run("predict", "model", *asked, "--task", "auto", "--threshold", "0.9")).splitlines()
    assert lines[0].split() == ["input", "task", "routing", "label", "probability", "next"]
    for line, sure, answer in zip(lines[1:], routed, rows, strict=True):
        told_in = [
            answer["name"],
            sure["task"],
            f"{answer['routing']:.3f}",
            sure["label"],
            f"{sure['probability']:.3f}",
        ]
        if answer["task"] is None:
            told_in = [answer["name"], "unknown", told_in[2], "–", "–", "perhaps", f"{told_in[1]}:", *told_in[3:]]
        assert line.split()[: len(told_in)] == told_in
    refused(run("predict", "model", asked[0], "--task", "low", "--threshold", "0.5"), "--threshold needs --task auto")
    refused(
        run("predict", "model", asked[0], "--task", "auto", "--rule", "binary", "--threshold", "0.5"),
        "was not measured",
    )

    assert good(run("verify", "model")) == (
        f"model: 6 files, {bytes_(Model.open(tmp_path / 'model').verify().bytes)}, all digests match; "
        "2 tasks, all unchanged since learned\n"
    )
    assert told(run("verify", "model", "--json"))["tasks"] == ["low", "high"]
    planned = told(run("plan", "model", "--tasks", "3", "--density", "0.05", "--json"))
    assert (planned["tasks"], planned["density"]) == (3, 0.05)
    assert 0 < planned["expected"] < planned["free"] < planned["size"]
    lines = good(run("plan", "model")).splitlines()
    assert "after 10 more tasks" in lines[0]
    assert lines[4].startswith("10 more tasks at density 0.1")
    assert told(run("show", "model"))["tasks"] == ["low", "high"]
    assert told(run("show", "model", "--task", "high"))["recipe"] == {"kind": "image", "shape": [1, 8, 8]}

    assert good(run("rename", "model", "--task", "low", "--to", "few")) == "low is now few\n"
    assert told(run("tasks", "model", "--json"))[1]["lender"] == "few"
    files = "its files stay until the next change: `exssnet rollback` restores it\n"
    assert re.fullmatch(
        rf"removed high: [\d,]+ weights are free again; all other tasks verified unchanged\n{files}",
        good(run("remove", "model", "--task", "high")),
    )
    assert good(run("rollback", "model")) == "undone: remove high\n"
    assert re.fullmatch(
        r"removed few: [\d,]+ weights are free again; all other tasks verified unchanged\n"
        rf"[\d,]+ values trained on it stay, because masks of other tasks use them\n{files}",
        good(run("remove", "model", "--task", "few")),
    )
    assert good(run("rollback", "model")) == "undone: remove few\n"
    refused(run("rollback", "model"), "no change to undo")
    assert [task["name"] for task in told(run("tasks", "model", "--json"))] == ["few", "high"]

    assert good(run("export", "model", "--task", "high", "--out", "high.safetensors")).startswith(
        "wrote high.safetensors"
    )
    good(run("export", "model", "--task", "high", "--format", "model", "--out", "alone"))
    assert told(run("verify", "alone", "--json"))["tasks"] == ["high"]
    refused(run("import", "model", "--from", "alone", "--task", "high"), "'high' has been learned already")
    good(run("import", "model", "--from", "alone", "--task", "high", "--as", "again"))
    refused(run("import", "model", "--from", "high.safetensors", "--task", "high"), "is one task: remove --task")
    assert good(run("import", "model", "--from", "high.safetensors", "--as", "third")).startswith("imported third;")
    tasks = ("high", "again", "third")
    rows = [told(run("evaluate", "model", "--task", task, "--data", "high", "--json"))[0] for task in tasks]
    assert rows[0]["accuracy"] == rows[1]["accuracy"] == rows[2]["accuracy"] > 80

    need("onnxruntime", "pip install 'exssnet[onnx]'")
    assert (
        good(run("export", "model", "--task", "high", "--format", "onnx", "--out", "high.onnx")) == "wrote high.onnx\n"
    )


@pytest.mark.parametrize(
    ("source", "label", "options", "epochs"),
    [
        ("ylecun/mnist/mnist/train-00000-of-00001.parquet", "label", ("--input", "1,28,28", *SMALL), 16),
        ("uoft-cs/cifar100/cifar100/train-00000-of-00002.parquet", "coarse_label",
         ("--network", "resnet18", "--width", "6", "--input", "3,16,16"), 12),
    ],
    ids=["mnist", "cifar100"],
)  # fmt: skip
def test_images_as_the_hub_has_them(exssnet: Forks, mirror: Path, tmp_path: Path, source, label, options, epochs):
    for name, classes in (("a", [0, 1]), ("b", [4, 9])):
        file = hub_rows(mirror / source, tmp_path / f"{name}.parquet", label, classes, 80)
        made = options if name == "a" else ()
        learned = told(exssnet("learn", "model", "--task", name, "--data", file, "--label", label, *made, "--epochs",
                               epochs, "--json", cwd=tmp_path))  # fmt: skip
        assert learned["labels"] == [names(file, label)[number] for number in classes]  # as the file itself says
    for name in ("a", "b"):
        (found,) = told(
            exssnet("evaluate", "model", "--task", name, "--data", f"{name}.parquet", "--json", cwd=tmp_path)
        )
        assert found["accuracy"] > 65
        answers = told(exssnet("predict", "model", f"{name}.parquet", "--task", name, "--json", cwd=tmp_path))
        assert [answers[0]["name"], len(answers)] == [f"{name}.parquet:0", 160]
    rows = told(exssnet("evaluate", "model", "--task", "auto", "--data", "a=a.parquet", "--data", "b=b.parquet",
                        "--json", cwd=tmp_path))  # fmt: skip
    assert [row["task"] for row in rows] == ["a", "b", None]
    assert told(exssnet("verify", tmp_path / "model", "--json"))["verified"]


def test_tables(exssnet: Forks, tmp_path: Path):
    def run(*arguments: object) -> Done:
        return exssnet(*arguments, cwd=tmp_path)

    wine, cancer = load_wine(), load_breast_cancer()
    kinds = [f"kind {label}" for label in wine.target]
    csv_file(tmp_path / "wine.csv", wine.data, wine.feature_names, kinds)
    columns = [name.replace(" ", "_") for name in cancer.feature_names[:13]]
    csv_file(tmp_path / "cancer.csv", cancer.data[:, :13], columns, ["bad" if y else "good" for y in cancer.target])
    order = np.random.default_rng(0).permutation(13)
    csv_file(tmp_path / "shuffled.csv", wine.data[:, order], [wine.feature_names[at] for at in order], kinds)

    for task in ("wine", "cancer"):
        learned = told(run("learn", "model", "--task", task, "--data", f"{task}.csv", "--label", "state",
                           *(SMALL if task == "wine" else ()), "--json"))  # fmt: skip
        assert learned["accuracy"] > 85
    scaling = told(run("show", "model", "--task", "wine"))["scaling"]
    train = np.abs(np.array(scaling["mean"]) / wine.data.mean(0) - 1).max()
    assert 0 < train < 0.1  # the mean of the train part, not of all
    shares = [told(run("evaluate", "model", "--task", "wine", "--data", file, "--json"))[0]["accuracy"]
              for file in ("wine.csv", "shuffled.csv")]  # fmt: skip
    assert shares[0] == shares[1] > 90  # columns are found by name
    answers = told(run("predict", "model", "shuffled.csv", "--task", "wine", "--json"))
    assert np.mean([answer["label"] == kind for answer, kind in zip(answers, kinds, strict=True)]) > 0.9
    assert answers[0]["name"] == "shuffled.csv:2"  # the line in the file
    refused(run("predict", "model", "wine.csv", "--task", "auto"), "the tasks have different kinds of input")
    good(run("verify", "model"))


def test_arrays_and_a_network_of_one_s_own(exssnet: Forks, tmp_path: Path):
    def run(*arguments: object) -> Done:
        return exssnet(*arguments, cwd=tmp_path)

    (tmp_path / "mine.py").write_text(NETWORK)
    low = DIGITS.target < 4
    np.savez(tmp_path / "low.npz", x=DIGITS.data[low].astype(np.float32), y=DIGITS.target[low])
    np.save(tmp_path / "x.npy", DIGITS.data[~low].astype(np.float32))
    np.save(tmp_path / "y.npy", DIGITS.target[~low])
    own = ("--network", "mine:network")
    for model, init in (("kept", ()), ("hashed", ("--init", "hashed", "--private", "norm,bias"))):
        first = told(run("learn", model, "--task", "low", "--data", "low.npz", *own, *init, "--epochs", "16", "--json"))
        later = ("learn", model, "--task", "high", "--data", "x.npy", "--labels", "y.npy", "--epochs", "16", "--json")
        refused(run(*later), "your own network: pass the module, on the command line with --network")
        repeated = ("--init", "hashed", "--private", "bias,norm") if model == "hashed" else ()
        second = told(run(*later, *own, *repeated))
        assert min(first["accuracy"], second["accuracy"]) > 80
        refused(run("predict", model, "low.npz", "--task", "low"), "with --network")
        refused(
            run("predict", model, "low.npz", "--task", "low", "--network", "mine:other"),
            "differs from the one the model was created with",
        )
        refused(run("predict", model, "low.npz", "--task", "low", "--network", "mine:broken"), "KeyError: 'no such'")
        refused(
            run("predict", model, "low.npz", "--task", "low", "--network", "mine:number"),
            "torch.nn.Module was expected",
        )
        answers = told(run("predict", model, "low.npz", "--task", "auto", *own, "--json"))
        assert np.mean([answer["likeliest"]["task"] == "low" for answer in answers]) > 0.5
        assert "give --network" in good(run("verify", model))
        assert "2 tasks, all unchanged" in good(run("verify", model, *own))
        assert "2 tasks on your own network" in good(run("tasks", model))
        good(run("plan", model, *own))
        good(run("export", model, "--task", "high", "--format", "model", "--out", f"{model}-high", *own))
        good(run("remove", model, "--task", "high", *own))
        good(run("import", model, "--from", f"{model}-high", "--task", "high", *own))
        (found,) = told(
            run("evaluate", model, "--task", "high", "--data", "x.npy", "--labels", "y.npy", *own, "--json")
        )
        assert found["accuracy"] > 80


def test_what_is_wrong_gets_one_line_and_changes_nothing(exssnet: Forks, tmp_path: Path):
    def run(*arguments: object) -> Done:
        return exssnet(*arguments, cwd=tmp_path)

    picture_folder(tmp_path / "good", (0, 1), each=12)
    good(run("learn", "model", "--task", "good", "--data", "good", "--input", "1,8,8", *SMALL, "--epochs", "2"))
    picture_folder(tmp_path / "one", (3,), each=4)
    picture_folder(tmp_path / "unreadable", (0, 1), each=4)
    (tmp_path / "unreadable/digit-1/0000.png").write_text("no image")
    for part in ("test", "train", "val"):
        (tmp_path / "parts" / part).mkdir(parents=True)
    picture_folder(tmp_path / "bomb", (0, 1), each=4)
    (tmp_path / "bomb/digit-1/0000.png").write_bytes(bomb())
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    csv_file(tmp_path / "table.csv", np.eye(4), list("abcd"), ["x", "y"] * 2)
    (tmp_path / "object.npz").write_bytes(b"PK\x05\x06" + bytes(18))
    before = content(tmp_path / "model")
    learn = ("learn", "model", "--task", "new", "--epochs", "2", "--data")
    for arguments, said in [
        ((*learn, "nowhere"), "no such file or folder"),
        ((*learn, "one"), "at least two"),
        ((*learn, "parts"), r"not classes; give parts/train to learn, and parts/test to evaluate"),
        ((*learn, "unreadable"), r"digit-1/0000\.png"),
        ((*learn, "bomb"), r"digit-1/0000\.png"),
        ((*learn, "empty"), "empty"),
        ((*learn, "empty.csv", "--label", "state"), r"empty\.csv"),
        ((*learn, "table.csv", "--label", "states"), "'?states'?"),
        ((*learn, "table.csv", "--label", "state"), "the network needs"),
        ((*learn, "object.npz"), r"object\.npz"),
        ((*learn, "good", "--density", "0"), "density is 0"),
        ((*learn, "good", "--width", "1"), "can only be set when a model is created"),
        ((*learn, "good", "--network", "resnet18"), "can only be set when a model is created"),
        ((*learn, "good", "--batch-size", "0"), "batch"),
        ((*learn, "good", "--optimizer", "adamm"), "adam"),
        (("learn", "model", "--task", "good", "--data", "good"), "exists"),
        (("learn", "model", "--task", "a/b", "--data", "good"), "cannot be the name of a task"),
        (("learn", "model", "--task", "auto", "--data", "good"), "cannot be the name of a task"),
        (("learn", "model", "--task", "new", "--data", "good", "--epochs", "0"), "epochs is 0"),
        (("rename", "model", "--task", "good", "--to", "a,b"), "cannot be the name of a task"),
        (("rename", "model", "--task", "good", "--to", "good"), "exists: choose another name"),
        (("rename", "model", "--task", "bad", "--to", "c"), "no task 'bad'"),
        (("remove", "model", "--task", "bad"), "no task 'bad'"),
        (("predict", "model", "table.csv", "--task", "good"), r"table\.csv"),
        (("predict", "model", "good/digit-0/0000.png", "--task", "bad"), "no task 'bad'"),
        (("evaluate", "model", "--task", "good", "--data", "one"), "digit-3"),
        (("evaluate", "model", "--task", "good", "--data", "good", "--data", "one"), "give --data once"),
        (("evaluate", "model", "--task", "auto", "--data", "good"), "give TASK=FILES"),
        (("evaluate", "model", "--task", "auto", "--data", "good=good", "--data", "good=one"), "twice"),
        (("evaluate", "model", "--task", "auto", "--data", "bad=good"), "no task 'bad'"),
        (("export", "model", "--task", "good", "--out", "table.csv"), "exists: choose another name"),
        (("import", "model", "--from", "good", "--task", "good"), "is not a model directory"),
        (("import", "model", "--from", "pipe.safetensors"), "pipe.safetensors.json cannot be read"),
        (("plan", "model", "--tasks", "0"), "tasks is 0"),
        (("tasks", "nowhere"), "is not a model directory"),
        (("verify", "nowhere"), "is not a model directory"),
    ]:
        refused(run(*arguments), said)
        assert content(tmp_path / "model") == before, arguments
    assert told(run("verify", "model", "--json"))["verified"]

    there = set(tmp_path.iterdir())
    for arguments, said in [
        (("--data", "one"), "at least two"),
        (("--data", "unreadable"), "0000"),
        (("--data", "good", "--lr", "-1"), "lr is -1"),
        (("--data", "good", "--density", "0"), "density is 0"),
        (("--data", "good", "--network", "lenet"), "unknown network 'lenet'"),
        (("--data", "good", "--method", "hat"), "cannot be stored in a model directory"),
        (("--data", "good", "--input", "3,x"), "give comma-separated whole numbers from 1"),
    ]:  # fmt: skip
        refused(run("learn", "new", "--task", "a", "--epochs", "2", *arguments), said)
        assert set(tmp_path.iterdir()) == there  # nothing is left of it


def test_while_one_process_learns_another_cannot_change_and_stopping_it_leaves_all_as_it_was(
    exssnet: Forks, tmp_path: Path
):
    np.savez(tmp_path / "a.npz", x=DIGITS.data.astype(np.float32), y=DIGITS.target)
    learn = ("--data", "a.npz", "--epochs")
    good(exssnet("learn", "model", "--task", "a", *learn, 2, *SMALL, cwd=tmp_path))
    before = content(tmp_path / "model")
    again = "run the same command to start again"
    for model, said in (
        ("model", f"model is unchanged, without 'b': {again}"),
        ("new", f"nothing was written to new: {again}"),
    ):
        process = exssnet.start("learn", model, "--task", "b", *learn, 100000, cwd=tmp_path)
        lock = tmp_path / model / "lock"
        patience = time.monotonic() + 60
        while not (lock.exists() and lock.read_text() == f"process {process}\n"):
            assert time.monotonic() < patience
            time.sleep(0.01)
        time.sleep(0.3)  # it is learning now
        if model == "model":
            refused(exssnet("rename", model, "--task", "a", "--to", "c", cwd=tmp_path),
                    f"is in use by process {process}: try again when it ends")  # fmt: skip
            assert told(exssnet("tasks", model, "--json", cwd=tmp_path))[0]["name"] == "a"
        os.kill(process, signal.SIGINT)
        done = exssnet.wait(process)
        assert (done.returncode, done.said, done.stdout) == (130, f"exssnet: stopped; {said}\n", "")
    assert content(tmp_path / "model") == before
    assert not (tmp_path / "new").exists()
