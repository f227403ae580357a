"""Comparisons of runs: what is averaged, what is paired, and what is refused."""

import json
import math
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.experiments.comparing import STUDIES, exssnet, rows

from exssnet.cli.compare_tables import FORMATS
from exssnet.errors import InputError, RunError
from exssnet.experiments import compare
from exssnet.experiments.config import RunConfig

OF_A_RUN = ("seed", "class_order_seed", "device", "threads", "compile")


def test_mean_spread_and_paired_interval_are_those_computed_by_hand(put):
    put("exssnet", [90.0, 92.0, 97.0])
    put("er", [89.0, 90.0, 93.0], forgetting=1.5, storage={"a_bits": 8e6, "b_bits": 4e6, "paper_bits": 1e9})
    er = {row.method: row for row in rows(put("naive", [50.0]))}["er"]
    mean = (89 + 90 + 93) / 3
    std = math.sqrt(((89 - mean) ** 2 + (90 - mean) ** 2 + (93 - mean) ** 2) / 2)
    assert er.accuracy == pytest.approx((mean, std))
    assert er.forgetting == (1.5, 0.0)
    assert er.megabytes == (1.5, 0.0)
    # differences -1, -2, -4: mean -7/3, std sqrt(7/3); the 97.5 % point of t with two degrees of freedom is 4.302653
    assert er.difference.mean == pytest.approx(-7 / 3)
    assert er.difference.half == pytest.approx(4.302652730 * math.sqrt(7 / 3) / math.sqrt(3))
    assert er.difference.pairs == 3


values = st.dictionaries(st.tuples(st.integers(0, 9), st.just(0)), st.floats(0, 100), min_size=2)


@given(values, values)
def test_the_interval_is_that_of_a_paired_t_test_over_common_seeds(mine, theirs):
    common = sorted(mine.keys() & theirs.keys())
    found = compare.difference(mine, theirs)
    if len(common) < 2:
        assert found is None
        return
    gaps = [mine[seed] - theirs[seed] for seed in common]
    assert found.pairs == len(common)
    assert found.mean == pytest.approx(sum(gaps) / len(gaps), abs=1e-9)
    error = float(stats.sem(gaps))
    assert found.half == pytest.approx(float(stats.t.ppf(0.975, len(gaps) - 1)) * error, abs=1e-9)
    other_way = compare.difference(theirs, mine)
    assert (other_way.mean, other_way.half) == pytest.approx((-found.mean, found.half), abs=1e-9)


def test_one_common_seed_gives_no_interval_and_no_method_to_compare_with_no_column(put):
    put("exssnet", [90.0, 92.0])
    folder = put("er", [80.0])
    assert all(row.difference is None for row in rows(folder))
    assert "vs exssnet: left out" in FORMATS["text"](rows(folder)).replace("\n", " ")
    put("si", [70.0, 71.0])
    for form in ("markdown", "latex"):
        assert "vs er: left out" in re.sub("\n%?", "", FORMATS[form](rows(folder, against="er")))
    assert "vs si: mean difference" in FORMATS["text"](rows(folder, against="si")).replace("\n", " ")


def test_names_that_look_like_markup_are_shown_as_they_are(put):
    put("[red]er", [80.0, 82.0])
    shown = FORMATS["text"](rows(put("exssnet", [90.0, 92.0]), against="[red]er"))
    assert [line.split()[0] for line in shown.splitlines() if "±" in line][:2] == ["exssnet", "[red]er"]
    assert "vs [red]er" in shown.partition("exssnet ")[0]  # in the heading


def test_a_method_with_several_heads_is_compared_with_by_name_and_head(put):
    put("er", [80.0, 82.0], config={"head": "task"})
    put("er", [70.0, 71.0], place="b", config={"head": "masked-test"})
    folder = put("exssnet", [90.0, 92.0])
    assert [row.difference.mean for row in rows(folder, against="er@task") if row.method == "exssnet"] == [10]
    found = rows(folder, against="er@masked-test")
    assert {(row.method, row.head): row.difference and row.difference.mean for row in found} == {
        ("exssnet", "shared"): 20.5,
        ("er", "task"): 10.5,
        ("er", "masked-test"): None,
    }
    for form in FORMATS:
        assert "er@masked-test" in FORMATS[form](found)
    with pytest.raises(InputError, match="'er' was run with several heads: choose er@masked-test or er@task"):
        rows(folder, against="er")
    with pytest.raises(InputError, match="no run of 'exssnet@task' to compare with: choose exssnet@shared"):
        rows(folder, against="exssnet@task")


@pytest.mark.parametrize("against", ["er@task", "er@masked-test", "multitask@task", "packnet", "exssnet+kkt"])
def test_every_real_row_but_one_is_compared_with_the_method_that_is_named(against):
    for benchmark in ("split-cifar100", "split-mnist-all-methods"):
        found = rows(STUDIES / benchmark, against=against)
        assert [f"{row.method}@{row.head}" for row in found if row.difference is None] in (
            [against],
            [f"{against}@task"],
            [f"{against}@shared"],
        )


@pytest.mark.parametrize(
    ("config", "settings", "label"),
    [
        ({"precision": "bf16"}, {}, "precision=bf16"),
        ({"network": "resnet18"}, {}, "network=resnet18"),
        ({"optimizer": "sgd"}, {}, "optimizer=sgd"),
        ({}, {"mask_epochs": 1}, "mask_epochs=1"),
    ],
)
def test_runs_with_other_settings_are_rows_of_their_own_and_say_what_differs(put, config, settings, label):
    put("exssnet", [90.0, 92.0])
    folder = put("exssnet", [80.0, 82.0], place="b", config=config, settings=settings)
    first, second = rows(folder)
    assert (first.accuracy[0], second.accuracy[0]) == (91.0, 81.0)
    assert second.differs[0] == label
    assert first.differs[0].partition("=")[0] == label.partition("=")[0]
    for form in ("text", "markdown", "csv"):
        assert label in FORMATS[form]([first, second])
    assert label.replace("_", r"\_") in FORMATS["latex"]([first, second])


def test_how_kkt_lends_matters_only_where_there_is_kkt(put):
    for method in ("ssnet", "ssnet+kkt"):
        put(method, [90.0])
        folder = put(method, [92.0], place="b", settings={"kkt_start": "scores"}, seed=1)
    found = [(row.method, row.seeds, row.accuracy[0], row.differs) for row in rows(folder)]
    assert found == [
        ("ssnet+kkt", 1, 92.0, ("kkt_start=scores",)),
        ("ssnet", 2, 91.0, ()),
        ("ssnet+kkt", 1, 90.0, ("kkt_start=bits",)),
    ]


def test_runs_of_other_tasks_are_another_block_with_a_best_of_its_own(put):
    put("exssnet", [90.0, 92.0])
    folder = put("er", [99.0, 99.0], place="b", config={"tasks": 2})
    found = rows(folder)
    assert [(row.title, row.method, row.best) for row in found] == [
        ("split-mnist, tasks 2", "er", True),
        ("split-mnist, tasks 5", "exssnet", True),
    ]
    assert [row.difference for row in found] == [None, None]


def test_methods_that_were_trained_longer_say_so(put):
    put("exssnet", [90.0, 92.0])
    found = {row.method: row.differs for row in rows(put("er", [80.0, 82.0], epochs=3))}
    assert found == {"exssnet": ("epochs per task=30",), "er": ("epochs per task=3",)}


def test_seconds_of_different_devices_are_not_averaged(put):
    put("exssnet", [90.0])
    folder = put("exssnet", [0.0, 92.0], place="b", device="cuda (some GPU)", config={"threads": 3})
    (folder / "b/split-mnist/exssnet/seed-0/results.json").unlink()
    (row,) = rows(folder)
    assert row.seeds == 2
    assert row.seconds is None
    assert all(FORMATS[form]([row]) for form in FORMATS)


def test_heads_are_apart_and_need_no_label(put):
    put("er", [90.0, 92.0], config={"head": "task"})
    folder = put("er", [80.0, 82.0], place="b", config={"head": "shared"})
    assert [(row.head, row.accuracy[0], row.differs) for row in rows(folder)] == [("task", 91, ()), ("shared", 81, ())]


@pytest.mark.parametrize("field", OF_A_RUN)
def test_what_belongs_to_one_run_does_not_split_a_row(put, field):
    assert field in RunConfig.__dataclass_fields__
    put("exssnet", [90.0])
    other = {"seed": 1, "class_order_seed": 1} | {field: {"device": "cuda", "compile": "on"}.get(field, 7)}
    folder = put("exssnet", [92.0], place="b", config=other, seed=1)
    (row,) = rows(folder)
    assert (row.seeds, row.accuracy[0]) == (2, 91.0)


def test_records_from_before_a_setting_existed_stand_with_those_that_have_its_default(put):
    folder = put("exssnet", [90.0, 92.0], config={"schedule": "cosine"})
    file = folder / "a/split-mnist/exssnet/seed-1/results.json"
    record = json.loads(file.read_text())
    for later in ("weight_decay", "schedule", "evaluate"):
        del record["config"][later]
    file.write_text(json.dumps(record))
    assert [row.seeds for row in rows(folder)] == [2]


def test_what_methods_should_share_is_said_where_they_do_not(put):
    put("exssnet", [90.0, 92.0], config={"precision": "bf16", "optimizer": "adamw"})
    found = {row.method: row.differs for row in rows(put("er", [80.0, 82.0]))}
    assert found == {"exssnet": ("precision=bf16",), "er": ("precision=fp32",)}  # an optimizer is a method's own affair


def test_differences_are_taken_between_runs_that_share_what_they_should(put):
    put("exssnet", [90.0, 92.0], config={"precision": "bf16"})
    put("exssnet", [80.0, 81.0], place="b")
    put("er", [70.0, 72.0], config={"precision": "bf16"})
    put("er", [70.0, 73.0], place="b")
    folder = put("si", [50.0, 50.0], config={"tasks": 2})
    found = {(row.method, *row.differs): row.difference and row.difference.mean for row in rows(folder)}
    assert {key[0]: value for key, value in found.items() if "precision=bf16" in key} == {"exssnet": None, "er": -20}
    assert found[("si",)] is None
    assert [value for (method, *rest), value in found.items() if method == "er" and "precision=fp32" in rest] == [-9]
    put("exssnet", [60.0, 61.0], place="c", settings={"lr": 0.5})
    found = {row.difference for row in rows(folder) if row.method == "er" and "precision=fp32" in row.differs}
    assert found == {None}  # against which of the two?


def test_the_same_file_counts_once_and_the_same_run_twice_is_refused(put):
    folder = put("exssnet", [90.0, 92.0])
    assert len(compare.read([folder, folder / "a", folder / "a/split-mnist/exssnet/seed-0"])) == 2
    put("exssnet", [91.0], place="b")
    with pytest.raises(InputError, match=r"a/split-mnist.* and .*b/split-mnist.* have the same settings and seed"):
        rows(folder)


def test_bounds_come_first_and_are_never_the_best(put):
    put("multitask", [99.0], forgetting=None)
    put("individual", [99.5])
    put("er", [80.0])
    put("si", [90.001])
    folder = put("lwf", [90.004])
    assert [row.method for row in rows(folder)] == ["individual", "multitask", "lwf", "si", "er"]
    assert [row.method for row in rows(folder, sort="name")] == ["individual", "multitask", "er", "lwf", "si"]
    assert [row.method for row in rows(folder) if row.best] == ["lwf", "si"]  # 90.00 both, as shown
    assert "(–)" in FORMATS["text"](rows(folder))


def test_published_numbers_stand_beside_runs_made_as_the_published_ones_only(put):
    def record(method, place="a", epochs=100, settings=None, miniature=False, **config):
        config = {"network": "resnet18"} | config
        return put(
            method, [40.0], "split-cifar100", place, config, {"buffer": 0.001} | (settings or {}),
            epochs=epochs, miniature=miniature,
        )  # fmt: skip

    record("ssnet")
    record("exssnet+kkt")
    record("er", head="masked-test")
    record("ssnet", "miniature", miniature=True)
    record("supsup", epochs=50)
    record("exssnet", "tasks", tasks=10)
    record("icarl")  # the paper has no number
    record("der", head="task")
    record("der++", head="masked-test", settings={"buffer": 500})
    record("supsup+kkt", settings={"density": 0.3})
    record("naive", network="resnet50", head="masked-test")
    folder = record("lwf", width=64.0, head="masked-test")
    found = sorted((row.method, row.miniature, row.published) for row in rows(folder) if row.published)
    assert found == [
        ("er", False, (60.1, 27.5)), ("exssnet+kkt", False, (70.5, None)), ("ssnet", False, (23.9, 54.4)),
    ]  # fmt: skip
    assert len(rows(folder)) == 12


def test_published_numbers_of_text_stand_beside_runs_with_its_encoder_on_all_of_the_data(put):
    def record(place, sample=False, **config):
        config = {"network": "text-cnn", "encoder": "bert-base-uncased"} | config
        return put("exssnet", [40.0], "webnlp-s2", place, config, {}, epochs=4, sample=sample)

    record("as published")
    record("a part of the data", sample=True)
    record("another encoder", encoder="random:100:0")
    record("another number of tasks", tasks=3)
    folder = record("without the task", setting="class-incremental")
    assert [row.published for row in rows(folder) if row.published] == [(77.0, 0.0)]
    assert len(rows(folder)) == 5
    assert sum(row.title.endswith("(sample)") for row in rows(folder)) == 1


@pytest.mark.parametrize(("second", "proved"), [(True, True), (False, False), (None, None)])
def test_a_row_is_proved_if_every_one_of_its_runs_is(put, second, proved):
    proof = {"verified": True, "digests": {}, "changed": []}
    put("exssnet", [90.0], zero_forgetting=proof)
    other = None if second is None else proof | {"verified": second}
    (row,) = rows(put("exssnet", [91.0], place="b", seed=1, zero_forgetting=other))
    assert (row.seeds, row.proved) == (2, proved)


def test_miniatures_are_a_block_of_their_own_and_say_so(put):
    put("exssnet", [90.0], place="b", miniature=True, config={"samples_per_class": 10})
    found = rows(put("exssnet", [95.0]))
    assert [row.title for row in found] == ["split-mnist", "split-mnist (miniature)"]
    for form in ("text", "markdown", "latex"):
        assert "(miniature)" in FORMATS[form](found)


def test_comparing_does_not_import_torch():
    code = (
        "import sys, exssnet.cli.main\n"
        f"sys.argv = ['exssnet', 'compare', {str(STUDIES / 'split-mnist')!r}]\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "exssnet.cli.main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("key", ["benchmark", "method", "seed", "average_accuracy", "seconds", "storage", "config"])
def test_a_record_without_a_key_says_which(put, key):
    folder = put("exssnet", [90.0])
    file = folder / "a/split-mnist/exssnet/seed-0/results.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in record.items() if name != key}))
    with pytest.raises(RunError, match=f"{key} is missing"):
        compare.read([folder])
    file.write_text(json.dumps(record | {"average_accuracy": float("nan")}))
    with pytest.raises(RunError, match="NaN is not a JSON number"):
        compare.read([folder])


def test_bad_input_is_one_line_and_exit_code_2(put, tmp_path):
    folder = put("exssnet", [90.0, 91.0])
    (tmp_path / "empty").mkdir()
    for arguments, message in [
        ([tmp_path / "nowhere"], "nowhere is not a folder"),
        ([tmp_path / "empty"], "empty has no finished run"),
        ([folder, tmp_path / "empty"], "empty has no finished run"),
        ([folder, "--against", "er"], "no run of 'er' to compare with: choose one of exssnet"),
    ]:
        done = exssnet(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert message in done.stderr
