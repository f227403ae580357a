"""The command line as a user meets it: separate processes, their output and exit codes."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from exssnet.methods import general

QUICK = ("--mask-epochs", "1", "--weight-epochs", "1", "--tasks", "2")


def test_a_run_prints_its_tasks_the_proof_and_where_it_lies(exssnet, tmp_path):
    done = exssnet("run", "split-digits", "--kkt", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("exssnet+kkt seed 0: task 1/2 mask 1/1, 0 % done\n")  # no bar: it is no terminal
    assert done.said == ""
    assert "exssnet+kkt on split-digits, seed 0" in done.stdout
    assert "forgetting 0.00" in done.stdout
    assert "zero forgetting: verified, all 2 tasks have the digest they were learned with" in done.stdout
    assert "run: runs/split-digits/exssnet+kkt/seed-0" in done.stdout
    assert (tmp_path / "runs/split-digits/exssnet+kkt/seed-0/results.json").exists()


def test_several_methods_and_seeds_print_mean_and_spread(exssnet, tmp_path):
    done = exssnet("run", "split-digits", "--method", "ssnet,exssnet+kkt", "--seeds", "0,1", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.split("mean ± std over seeds")[1].splitlines()
    assert [row.split()[0] for row in rows if "±" in row] == ["ssnet", "exssnet+kkt"]
    assert "changed after they were learned" in done.stdout


def test_several_heads_are_run_with_every_method_that_has_them(exssnet, tmp_path):
    few = ("--epochs", "2", "--tasks", "2")
    methods = ("--method", "naive,packnet,exssnet")
    done = exssnet("run", "split-digits", *methods, "--head", "task,masked-test", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.said == ""
    found = sorted(folder.name for folder in (tmp_path / "runs/split-digits").iterdir())
    assert found == ["exssnet@task", "naive", "naive@masked-test", "packnet"]
    rows = [row.split()[:3] for row in done.stdout.split("mean ± std over seeds")[1].splitlines()]
    for row in (["naive", "task", "1"], ["naive", "masked", "1"], ["packnet", "task", "1"]):
        assert row in rows
    done = exssnet("run", "split-digits", *methods, "--head", "masked-test", *few, cwd=tmp_path)
    assert (
        done.said
        == "exssnet: these methods do not have head masked-test and use their own: exssnet (shared), packnet (task)\n"
    )


def test_all_methods_may_have_others_beside_them(exssnet, tmp_path):
    few = ("--epochs", "1", "--tasks", "2", "--json")
    done = exssnet("run", "split-digits", "--method", "all,exssnet+kkt", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [record["method"] for record in records] == [*general(), "exssnet+kkt"]
    assert {record["epochs"] for record in records} == {1}


def test_what_one_of_several_runs_refuses_is_refused_before_the_first(exssnet, tmp_path):
    too_small = ("--method", "naive,icarl", "--head", "masked-test", "--buffer", "5")
    done = exssnet("run", "split-digits", *too_small, "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "exssnet: buffer is 5.0, 5 examples for 10 classes: iCaRL needs one for each, give a larger --buffer\n"
    )
    assert list(tmp_path.iterdir()) == []
    for options in (("--epochs", "1"), ("--epochs", "2")):
        done = exssnet("run", "split-digits", "--method", "naive,ssnet", *options, "--seeds", "1", cwd=tmp_path)
        if options[1] == "1":
            shutil.rmtree(tmp_path / "runs/split-digits/naive")
    assert done.returncode == 2
    assert "another configuration" in done.stderr
    assert not (tmp_path / "runs/split-digits/naive").exists()


def test_json_prints_the_record_and_nothing_else(exssnet, tmp_path):
    done = exssnet("run", "split-digits", *QUICK, "--json", cwd=tmp_path)
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "runs/split-digits/exssnet/seed-0/results.json").read_text())
    done = exssnet("run", "split-digits", *QUICK, "--seeds", "0,1", "--json", cwd=tmp_path)
    assert [record["seed"] for record in json.loads(done.stdout)] == [0, 1]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        (
            "methods",
            ["adapter-ft", "adapter-replay", "agem", "cgate", "der", "der++", "er", "ewc-online", "exssnet",
             "fine-tune", "hat", "icarl", "idbr", "individual", "lamol", "lwf", "mbpa++", "multi-adapter", "multitask",
             "naive", "packnet", "piggyback", "prompt-tuning", "regularization", "replay", "si", "ssnet", "supsup",
             "text-individual", "text-multitask", "wsn"],
        ),
        (
            "benchmarks",
            ["glue-s1", "permuted-mnist", "rotated-mnist", "split-cifar100", "split-digits", "split-imagenet",
             "split-mnist", "split-tiny-imagenet", "webnlp-s2", "webnlp-s3", "webnlp-s4", "webnlp-s5", "webnlp-s6",
             "webnlp-s7", "webnlp-s8"],
        ),
        ("models", ["lenet-300-100", "mlp", "resnet18", "resnet50", "text-cnn", "text-cnn-relu"]),
    ],
)  # fmt: skip
def test_list_names_everything_with_a_line_each(exssnet, what, names):
    done = exssnet("list", what, COLUMNS="200")
    assert [line.split()[0] for line in done.stdout.splitlines()] == names
    assert all(len(line.split()) > 3 for line in done.stdout.splitlines())


def test_help_and_import_do_not_import_torch(exssnet):
    code = "import sys, exssnet.cli.main; assert not {'torch', 'exssnet.model'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = (
        "import sys; sys.argv = ['exssnet', '--help']\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "import exssnet.cli.main; exssnet.cli.main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "run" in done.stdout
    assert exssnet("--version").stdout.startswith("exssnet 0.")


BAD = {
    "density 0": (["--density", "0"], "density is 0.0: it must be above 0 and at most 1"),
    "density above 1": (["--density", "1.2"], "density is 1.2"),
    "a layer without a weight": (["--density", "0.0001"], "without a weight: use at least 0.002"),
    "unknown method": (["--method", "exsnet"], "unknown method 'exsnet': did you mean exssnet"),
    "unknown method far off": (["--method", "zzz"], "choose one of adapter-ft, "),
    "unknown model": (["--network", "resnet"], "unknown model 'resnet': did you mean resnet50 or resnet18?"),
    "unknown optimizer": (["--optimizer", "adm"], "did you mean adam or adamw?"),
    "unknown device": (["--device", "gpu"], "device 'gpu' is unknown: give auto, cpu or cuda"),
    "too many tasks": (["--tasks", "6"], "a task needs at least two classes"),
    "no tasks": (["--tasks", "0"], "give at least 1"),
    "a class twice": (["--class-order", "1,1,2,3"], "more than once"),
    "a class that is not there": (["--class-order", "1,2,3,44"], "class order has 44"),
    "a class order that is none": (["--class-order", "backwards"], "--class-order is 'backwards'"),
    "bad seeds": (["--seeds", "0;1"], "give comma-separated whole numbers"),
    "a seed twice": (["--seeds", "0,0"], "seed 0 is given twice"),
    "a method twice": (["--method", "ssnet,ssnet"], "method ssnet is given twice"),
    "a setting without a value": (["--set", "kkt_samples"], "write --set name=value"),
    "a setting that is none": (["--set", "kkt_sample=3"], "has no setting 'kkt_sample'"),
    "a setting that names the run": (["--set", "seed=4"], "seed is not a setting"),
    "a setting that is no YAML": (["--set", "lr=[1"], "lr is '[1': it cannot be read as YAML"),
    "kkt as a setting": (["--set", "kkt=true"], "has no setting 'kkt'"),
    "a setting of another type": (["--set", "kkt_samples=many"], "kkt_samples is 'many': give a value of type int"),
    "bad epochs": (["--mask-epochs", "0"], "mask_epochs is 0"),
    "bad rate": (["--lr", "-1"], "lr is -1.0"),
    "bad decay": (["--weight-decay", "-1"], "weight_decay is -1.0"),
    "unknown schedule": (["--schedule", "cosin"], "unknown schedule 'cosin': did you mean cosine?"),
    "bad batch": (["--batch-size", "0"], "batch_size is 0"),
    "bad validation": (["--validation", "1.5"], "validation is 1.5"),
    "bad width": (["--width", "-1"], "width"),
    "bad head": (["--head", "tail"], "head is 'tail'"),
    "a bad one of several heads": (["--head", "shared,tail"], "head is 'tail'"),
    "no head between commas": (["--head", ","], "head is ''"),
    "a head twice": (["--head", "task,task"], "head task is given twice"),
    "bad threads": (["--threads", "-2"], "threads is -2"),
    "bf16 on a CPU": (
        ["--precision", "bf16", "--device", "cpu"],
        "precision bf16 is about ten times slower than fp32 on a CPU",
    ),
    "compile on a CPU": (["--compile", "on", "--device", "cpu"], "compile on needs a GPU"),
    "unknown precision": (["--precision", "fp8"], "precision is 'fp8': choose one of auto, fp32, bf16"),
    "together on a CPU": (["--together", "2", "--device", "cpu"], "--together 2 needs a GPU"),
    "together nothing": (["--together", "0"], "--together is '0': give auto or a whole number"),
    "unknown evaluation": (["--evaluate", "never"], "evaluate is 'never': choose one of all, ends"),
    "images for another benchmark": (["--images", "x"], "--images needs split-imagenet"),
    "best without validation": (["--select", "best"], "needs a validation part"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_code_2_and_nothing_written(exssnet, tmp_path, case):
    options, message = BAD[case]
    arguments = [*QUICK, *options] if "--tasks" not in options else [*QUICK[:4], *options]
    done = exssnet("run", "split-digits", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("exssnet: ")
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_unknown_benchmarks_are_offered_the_nearest(exssnet, tmp_path):
    done = exssnet("run", "split-minst", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "exssnet: unknown benchmark 'split-minst': did you mean split-mnist or split-imagenet or split-digits?\n")  # fmt: skip  # noqa: E501
    assert exssnet("run", cwd=tmp_path).stderr.startswith("exssnet: no benchmark given")
    assert list(tmp_path.iterdir()) == []


def test_a_config_file_goes_with_nothing_else(exssnet, tmp_path):
    exssnet("run", "split-digits", *QUICK, cwd=tmp_path)
    config = tmp_path / "runs/split-digits/exssnet/seed-0/config.yaml"
    for other in (
        ["--method", "supsup"],
        ["--seeds", "5"],
        ["--kkt"],
        ["--lr", "0.1"],
        ["--set", "lr=1"],
        ["--threads", "0"],
        ["--validation", "0"],
    ):
        done = exssnet("run", "--config", config, *other, cwd=tmp_path)
        assert (done.returncode, done.stderr.splitlines()) == (2, [
            "exssnet: --config repeats a run: remove the benchmark and all other settings"
        ])  # fmt: skip


def test_class_order_is_refused_where_every_task_has_all_classes(exssnet, tmp_path):
    done = exssnet("run", "permuted-mnist", "--class-order", "seed", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "class_order cannot be set: permuted-mnist has all classes in every task" in done.stderr


def test_data_that_is_nowhere_is_one_line(exssnet, tmp_path):
    done = exssnet("run", "split-tiny-imagenet", cwd=tmp_path, EXSSNET_DATA=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "zh-plus/tiny-imagenet" in done.stderr


def test_an_output_folder_that_cannot_be_written_is_refused(exssnet, tmp_path):
    (tmp_path / "file").write_text("")
    done = exssnet("run", "split-digits", *QUICK, "--out", tmp_path / "file" / "runs")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"cannot write to {tmp_path}/file: choose another --out folder" in done.stderr
    done = exssnet("run", "split-digits", *QUICK, "--out", "/proc/runs")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "choose another --out folder" in done.stderr


def test_a_run_folder_from_another_config_is_refused_and_unchanged(exssnet, tmp_path):
    exssnet("run", "split-digits", *QUICK, cwd=tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    done = exssnet("run", "split-digits", *QUICK, "--density", "0.3", cwd=tmp_path)
    assert done.returncode == 2
    assert "has a run with another configuration (different: density)" in done.stderr
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "split-digits", "--out", "n" * 300], f"{'n' * 300}.*: File name too long"),
        (["compare", "n" * 300], f"{'n' * 300}.*: File name too long"),
        (["compare", "no\x1b[31mred"], r"no\\x1b\[31mred"),
        (["run", "split-digits", "--width", "1e9", "--out", "runs"], "not enough memory"),
    ],
)
def test_what_the_system_refuses_is_one_line_that_a_terminal_can_show(exssnet, arguments, message, tmp_path):
    done = exssnet(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(f"exssnet: .*{message}.*\n", done.stderr)
