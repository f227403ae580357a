"""How well tasks are told apart is measured when a task is learned, and an answer below the threshold is unknown."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.small import create, examples, learn
from tests.store.test_golden import GOLDEN

from exssnet import Model
from exssnet.data.files.labelled import hold_out
from exssnet.errors import InputError
from exssnet.store.routes import held_out
from exssnet.store.routes.held_out import Reading
from exssnet.store.routes.measured import MOST_TASKS, RIGHT, Measured, calibrated, candidates, probabilities, threshold
from exssnet.store.stored_model import StoredModel

QUICK = {"epochs": (6, 6), "batch_size": 16}


def arrays(file: Path, number: int, rows: int = 120) -> Path:
    x, y = examples(number, rows=rows)
    np.savez(file, x=x.numpy(), y=y.numpy())
    return file


def learned(place: Path, *numbers: int) -> StoredModel:
    """A directory whose tasks came from files, each learned by a process of its own as far as the directory knows."""
    create(place / "model", width=0.2)
    for number in numbers:
        Model.open(place / "model").learn(f"task {number}", arrays(place / f"{number}.npz", number), **QUICK)
    return Model.open(place / "model")


def test_the_counts_are_those_of_the_held_out_inputs(tmp_path: Path):
    model = learned(tmp_path, 1, 2, 3)
    measured = model.measured
    assert measured is not None
    assert (measured.tasks, measured.of, measured.not_measured) == (("task 1", "task 2", "task 3"), 3, {})
    for number in (1, 2, 3):
        x, y = examples(number, rows=120)
        held = hold_out(y, 0.1, model.base.seed)[1]
        assert len(held) == model.card(f"task {number}")["held_out"] == 12
        wanted = torch.bincount(model.route(x[held]).choice, minlength=3).tolist()
        assert list(measured.found[f"task {number}"]) == wanted
    assert model.found_shares() == {f"task {n}": measured.found[f"task {n}"][n - 1] / 12 for n in (1, 2, 3)}
    assert Measured.of_card(model.card("task 1")) is None  # there was nothing to tell apart
    assert model.summary()["routing"] == model.card("task 3")["routing"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: file.unlink(), "1.npz does not exist any more"),
        (lambda file: arrays(file, 7), "1.npz has changed"),
        (lambda file: arrays(file, 7, rows=40), "1.npz has changed"),
    ],
    ids=["gone", "changed", "shorter"],
)
def test_what_could_not_be_measured_is_said(tmp_path: Path, change, why: str):
    model = learned(tmp_path, 1)
    change(tmp_path / "1.npz")
    card = model.learn("task 2", arrays(tmp_path / "2.npz", 2), **QUICK).card
    assert card["routing"]["not_measured"] == {"task 1": f"{tmp_path}/{why}"}
    assert card["routing"]["found"].keys() == {"task 2"}


def test_examples_in_memory_are_measured_by_the_object_that_learned_them(tmp_path: Path):
    model = create(tmp_path / "model", width=0.2)
    for number in (1, 2):
        learn(model, f"task {number}", number, **QUICK)
    assert model.card("task 2")["source"] is None
    assert model.measured.found.keys() == {"task 1", "task 2"}
    model.rename("task 1", "first")
    learn(model, "task 3", 3, **QUICK)
    assert model.measured.found.keys() == {"first", "task 2", "task 3"}
    again = Model.open(tmp_path / "model")
    learn(again, "task 4", 4, **(QUICK | {"held_out": 0}))
    why = "its examples were given in memory, to another process"
    assert again.measured.not_measured == {
        "first": why, "task 2": why, "task 3": why, "task 4": "nothing was held out",
    }  # fmt: skip
    assert (again.measured.found, again.measured.threshold) == ({}, None)


def test_no_more_of_earlier_files_is_read_than_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = learned(tmp_path, 1, 2)
    size = (tmp_path / "2.npz").stat().st_size
    monkeypatch.setattr(held_out, "READ_BYTES", size + 1)
    model.learn("task 3", arrays(tmp_path / "3.npz", 3), **QUICK)
    assert model.measured.found.keys() == {"task 2", "task 3"}
    assert "1.npz has" in model.measured.not_measured["task 1"]


def test_held_out_inputs_read_again_are_those_that_were_held_out(tmp_path: Path, write_parquet, monkeypatch):
    from tests.user_files import picture_folder

    monkeypatch.chdir(tmp_path)
    picture_folder(Path("folder"), (0, 1, 2), each=20)
    draw = np.random.default_rng(0)
    pictures = draw.integers(0, 255, (60, 9, 7), dtype=np.uint8)
    write_parquet(Path("rows.parquet"), list(pictures), [row % 3 for row in range(60)])
    np.save("x.npy", pictures)
    np.save("y.npy", np.arange(60) % 3)
    model = Model.create("model", "lenet-300-100", input=(1, 8, 8), width=0.05)
    fast = {"epochs": (1, 1), "held_out": 0.3}
    model.learn("folder", "folder", **fast)
    model.learn("rows", "rows.parquet", label="label", **fast)
    model.learn("arrays", "x.npy", labels="y.npy", **fast)
    model.learn("memory", (torch.from_numpy(pictures[:, None, :8, :7].repeat(2, 3)[..., :8].copy()),
                           torch.arange(60) % 3), **fast)  # fmt: skip
    for name in ("folder", "rows", "arrays"):
        card = model.card(name)
        kept = model._held_out.reader(model.base.seed)(card, 200)
        read = Reading({}, model.base.seed)(card, 200)
        assert len(kept) == card["held_out"] > 15
        assert torch.equal(kept, read)
        assert torch.equal(
            Reading({}, model.base.seed)(card, 5), kept[[0, *(round(n * (len(kept) - 1) / 4) for n in (1, 2, 3)), -1]]
        )
    assert model.measured.found.keys() == {"folder", "rows", "arrays", "memory"}
    Path("folder/digit-1/0001.png").unlink(missing_ok=True)
    next(Path("folder/digit-1").iterdir()).write_bytes(b"")
    again = Model.open("model")
    again.learn("more", "x.npy", labels="y.npy", **fast)
    assert again.measured.not_measured["folder"] == "folder has changed"


def test_tables_are_read_again_too(tmp_path: Path):
    from tests.store.test_tables import circles, table

    model = Model.create(tmp_path / "model", input=(2,), width=0.05)
    for seed, name in enumerate("ab"):
        model.learn(name, table(tmp_path / f"{name}.csv", *circles(seed)), label="label", epochs=(1, 1))
    card = model.card("a")
    kept, read = model._held_out.reader(0)(card, 200), Reading({}, 0)(card, 200)
    assert len(kept) == 40
    assert torch.equal(kept, read)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Tasks that are easily told apart: each has columns of its own that say something."""
    model = create(tmp_path_factory.mktemp("apart") / "model", width=0.5)
    for number in (1, 2):
        model.learn(f"task {number}", easy(number), epochs=(20, 20))
    return model


def easy(number: int, rows: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * number + seed)
    y = torch.arange(rows) % 2
    x = 0.1 * torch.randn(rows, 12, generator=draw)
    x[:, 6 * (number - 1) : 6 * number] += 3 * (2 * y[:, None] - 1)
    return x, y


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Two tasks of the same inputs: nothing can tell them apart."""
    model = create(tmp_path_factory.mktemp("alike") / "model", width=0.5)
    x, y = easy(1)
    model.learn("a", (x, y), epochs=(10, 10))
    model.learn("b", (x, 1 - y), epochs=(10, 10))
    return model


def test_tasks_that_are_told_apart_are_answered(apart: StoredModel):
    assert apart.measured.warning() is None
    for number in (1, 2):
        x, y = easy(number, seed=1)
        found = apart.predict(x, task="auto")
        known = torch.tensor([task is not None for task in found.tasks])
        assert known.double().mean() > 0.7
        assert np.mean([task == f"task {number}" for task in found.tasks if task]) > 0.97
        assert torch.equal(found.classes[known], apart.predict(x, f"task {number}")[known])
        assert (found.classes[known] == y[known]).double().mean() > 0.97
        assert (found.routing[known] >= apart.measured.threshold).all()
        assert (found.routing[~known] < apart.measured.threshold).all()
        assert (found.classes[~known] == -1).all()
        assert found.probabilities[~known].isnan().all()
        share = apart.probabilities(x, f"task {number}").max(1).values
        torch.testing.assert_close(found.probabilities[known], share[known])
    assert repr(found).startswith("Found(400 inputs: task 2 ")


def test_tasks_that_cannot_be_told_apart_are_unknown_and_warned_of(alike: StoredModel):
    warning = alike.measured.warning()
    assert warning is not None
    assert "held-out inputs of '" in warning
    assert warning.endswith("--task auto is unreliable for these tasks")
    x, _ = easy(1, seed=1)
    found = alike.predict(x, task="auto")
    assert np.mean([task is None for task in found.tasks]) > 0.9
    assert float(found.routing.mean()) < 0.75  # though both are as good as certain of their class
    answered = alike.predict(x.numpy(), task="auto", threshold=0)
    assert None not in answered.tasks
    assert float(answered.probabilities.mean()) > 0.95


def test_a_threshold_can_be_chosen_and_has_to_be_a_probability(apart: StoredModel):
    x, _ = easy(1, seed=1)
    strict = apart.predict(x, task="auto", threshold=1)
    assert np.mean([task is None for task in strict.tasks]) > 0.99
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(InputError, match="give a probability from 0 to 1"):
            apart.predict(x, task="auto", threshold=wrong)
    with pytest.raises(InputError, match=r"routing was not measured: .* the rule 'confident'"):
        apart.predict(x, task="auto", rule="one-shot", threshold=0.5)
    free = apart.predict(x, task="auto", rule="one-shot")
    assert free.routing is None
    assert None not in free.tasks


def test_a_directory_without_a_measure_answers_and_has_no_probability(tmp_path: Path):
    model = Model.open(Path(shutil.copytree(GOLDEN / "built-in", tmp_path / "model")))
    x = examples(1)[0]
    found = model.predict(x, task="auto")
    assert (found.routing, None in found.tasks, model.measured, model.found_shares()) == (None, False, None, {})
    with pytest.raises(InputError, match=r"threshold is 0\.5, but routing was not measured"):
        model.predict(x, task="auto", threshold=0.5)


def test_a_measure_follows_renames_and_removals(tmp_path: Path):
    model = learned(tmp_path, 1, 2, 3)
    before = model.measured
    model.rename("task 1", "first")
    assert model.measured == before.renamed("task 1", "first")
    assert model.measured.tasks == ("first", "task 2", "task 3")
    assert Model.open(tmp_path / "model").found_shares()["first"] == before.share("task 1")
    model.remove("first")
    assert model.measured.tasks == ("task 2", "task 3")
    assert model.measured.found == {
        name: counts[1:] for name, counts in before.found.items() if name != "task 1"
    }  # fmt: skip
    learn(model, "first", 5, **QUICK)  # another task of that name
    assert model.measured.tasks == ("task 2", "task 3", "first")
    model.remove("first")
    model.remove("task 3")
    assert model.measured is None
    assert model.verify().verified


def test_an_imported_task_is_measured_among_the_tasks_it_comes_to(tmp_path: Path):
    model = learned(tmp_path, 1, 2)
    (tmp_path / "elsewhere").mkdir()
    other = learned(tmp_path / "elsewhere", 3, 4)
    model.import_task(other, "task 4", "imported")
    assert model.measured.tasks == ("task 1", "task 2", "imported")
    assert model.measured.found.keys() == {"task 1", "task 2", "imported"}
    model.export("imported", tmp_path / "alone", "model")
    assert Model.open(tmp_path / "alone").measured is None


# --- Bounds and mathematics ----------------------------------------------------------------------------------


def card(number: int, lender: int | None = None, columns: list[str] | None = None) -> dict:
    return {
        "task": {"name": str(number), "lender": None if lender is None else str(lender)},
        "recipe": {"kind": "table", "shape": [1], "columns": columns or ["x"]},
    }


@pytest.mark.parametrize("lender", [None, 0, 431, 998])
def test_of_a_thousand_tasks_twenty_are_measured_the_lender_and_some_evenly_spread(lender: int | None):
    chosen = [int(one["task"]["name"]) for one in candidates([*map(card, range(999)), card(999, lender)])]
    assert len(chosen) == MOST_TASKS == 20
    assert chosen == sorted(chosen)
    assert {0, 998, 999} <= set(chosen)
    assert lender is None or lender in chosen
    others = [number for number in chosen if number != lender]
    assert max(np.diff(others)) < 65


def test_only_tasks_of_the_same_inputs_are_candidates():
    cards = [card(0), card(1, columns=["y"]), card(2), card(3)]
    assert [one["task"]["name"] for one in candidates(cards)] == ["0", "2", "3"]
    assert [one["task"]["name"] for one in candidates(cards[:2])] == ["1"]
    assert len(candidates([*map(card, range(20))])) == 20


def drawn(spread: float, tasks: int = 3, rows: int = 900) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a router whose log certainties are right up to noise."""
    draw = torch.Generator().manual_seed(0)
    own = torch.arange(rows) % tasks
    certainty = 10 + spread * torch.randn(rows, tasks, generator=draw).double()
    certainty[torch.arange(rows), own] += 3
    return -(-certainty).exp(), own


@pytest.mark.parametrize("spread", [0.5, 1.5, 3.0, 8.0])
def test_routing_probabilities_are_right_as_often_as_they_say(spread: float):
    scores, own = drawn(spread)
    temperature, _ = calibrated(scores, own)
    best, choice = probabilities(scores, temperature).max(1)
    right = (choice == own).double()
    assert float(best.mean()) == pytest.approx(float(right.mean()), abs=0.03)
    upper = best > best.median()
    assert float(best[upper].mean()) == pytest.approx(float(right[upper].mean()), abs=0.06)


@pytest.mark.parametrize("seed", range(20))
def test_above_the_threshold_enough_are_right_and_below_it_enough_are_left_out(seed: int):
    draw = torch.Generator().manual_seed(seed)
    rows = 5 + 20 * seed
    p = (torch.rand(rows, generator=draw).double() * 20).round() / 20  # with ties
    right = (torch.rand(rows, generator=draw) < 0.75 + 0.25 * p).double()
    weight = torch.ones(rows).double() / rows
    doubt = 0 if right.all() else 1

    def fits(t: float) -> bool:
        above = p >= t
        enough = (right * above).sum() >= RIGHT * (above.sum() + doubt) - 1e-9
        return bool(enough and above.sum() < 0.95 * rows + 1)

    wanted = min((t for t in p.tolist() if fits(t)), default=1.0)
    assert threshold(p, right, weight) == wanted


def test_every_task_counts_alike_in_the_measure():
    """Inputs of one task are easy, of the other hard; the easy ones are the more, and count as much."""
    (easy_ones, own), (hard, _) = drawn(0.5, tasks=2, rows=200), drawn(8.0, tasks=2, rows=200)
    scores = torch.where(own[:, None] == 0, easy_ones, hard)
    many, of = torch.cat([scores, *[scores[own == 0]] * 20]), torch.cat([own, *[own[own == 0]] * 20])
    assert calibrated(many, of)[0] == pytest.approx(calibrated(scores, own)[0], rel=0.15)
