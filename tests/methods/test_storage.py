"""What a method says it keeps, counted by hand: numbers of 32 bits, labels and counters of 64, masks of one."""

import pytest
import torch
from tests.methods.small import made, normed, task

from exssnet.methods import general, parse
from exssnet.methods.base import JointMethod
from exssnet.methods.masks.supsup import MaskSettings
from exssnet.train import Trainer, TrainSettings

HIDDEN, BUFFER, TASKS = 8, 18, 2
STATISTICS = 2 * HIDDEN * 32  # mean and variance of a norm layer


def learned(method):
    tasks = [task(index) for index in range(TASKS)]
    for one in [method.together(tasks)] if isinstance(method, JointMethod) else tasks:
        Trainer(method, 0, TrainSettings(10)).learn(one)
    return method


STORED = {  # the network itself: numbers for each weight, and for each position in the memory
    "naive": (0, None), "multitask": (0, None), "lwf": (0, None), "ewc-online": (1, None), "si": (1, None),
    "er": (0, 0), "agem": (0, 0), "der": (0, 6), "der++": (0, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_a_dense_method_keeps_its_network_its_norm_statistics_and_what_the_rule_needs(name):
    remembers = {} if STORED[name][1] is None else {"buffer": BUFFER}
    outputs = 3 * TASKS
    method = learned(made(name, classes=(3,) * TASKS, module=normed(outputs), **remembers))
    weights = 6 * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * outputs + outputs
    of_weights, of_places = STORED[name]
    expected = {
        "weight_bits": 32 * weights,
        "private_bits": STATISTICS + 64,  # and the counter of its batches
        "method_bits": 32 * weights * of_weights,
    }
    if of_places is not None:
        expected["memory_bits"] = BUFFER * (32 * 6 + 64 + 32 * of_places)
    assert method.storage() == expected


def test_icarl_keeps_exemplars_and_means():
    method = learned(made("icarl", classes=(3,) * TASKS, module=normed(3 * TASKS), buffer=BUFFER))
    assert method.storage()["memory_bits"] == BUFFER * (32 * 6 + 64)
    assert method.storage()["method_bits"] == 32 * 3 * TASKS * HIDDEN


def test_individual_networks_are_kept_whole():
    method = learned(made("individual", classes=(3,) * TASKS, head="shared", module=normed(3)))
    weights = 6 * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * 3 + 3
    assert method.storage() == {"weight_bits": TASKS * (32 * weights + STATISTICS + 64)}


@pytest.mark.parametrize("head", ["shared", "task"])
@pytest.mark.parametrize("name", ["supsup", "exssnet", "ssnet", "packnet", "piggyback", "wsn"])
def test_a_method_with_masks_keeps_a_bit_per_weight_and_task_and_each_task_s_statistics(name, head):
    kind = parse(name)[0]
    short = {"mask_epochs": 2, "weight_epochs": 2} if issubclass(kind.settings_type, MaskSettings) else {"epochs": 2}
    options = {} if name == "piggyback" else {"density": 0.3}
    method = kind(normed(3), kind.settings_type(**short, **options), 0, head)
    start = method.network.weights.clone()
    found = learned(method).storage()
    masked = 6 * HIDDEN + (HIDDEN * 3 if head == "shared" else 0)
    own = STATISTICS + (32 * (HIDDEN * 3 + 3) if head == "task" else 0)
    assert found["mask_bits"] == TASKS * masked
    assert found["private_bits"] == TASKS * own
    moved = int((method.network.weights != start).count_nonzero())
    used = torch.stack([method.network.mask(f"task{number + 1}") for number in range(TASKS)]).any(0)
    assert found["weight_bits"] == (0 if name == "supsup" else 32 * int(used.sum()))  # what two tasks use counts once
    assert 32 * moved <= found["weight_bits"]
    assert (moved == 0) == (name == "supsup")
    assert found.get("score_bits", 0) == (32 * masked if name == "wsn" else 0)


@pytest.mark.parametrize("start", ["bits", "scores"])
def test_raw_scores_are_counted_where_they_are_what_is_lent(start):
    settings = MaskSettings(density=0.3, mask_epochs=2, weight_epochs=1, kkt=True, kkt_start=start)
    method = parse("exssnet")[0](normed(3), settings, 0)
    masked = 6 * HIDDEN + HIDDEN * 3
    assert learned(method).storage()["score_bits"] == (32 * masked * TASKS if start == "scores" else 0)


@pytest.mark.parametrize(
    ("name", "density", "trained"),
    [("exssnet", 0.3, 0.6), ("exssnet", 0.7, 1.0), ("ssnet", 0.7, 1.0), ("supsup", 0.7, 0.0)],
)
def test_the_paper_s_estimate_counts_no_trained_weight_twice(name, density, trained):
    """min(|W|·k·t, |W|) numbers, and a bit per weight and task."""
    method = parse(name)[0](normed(3), MaskSettings(density=density, mask_epochs=1, weight_epochs=1), 0)
    masked = 6 * HIDDEN + HIDDEN * 3
    assert learned(method).storage()["paper_formula_bits"] == 32 * round(trained * masked) + TASKS * masked


def test_every_method_is_counted_in_one_of_these_tests():
    elsewhere = {"hat", "cgate"}  # tests/methods/test_gates.py
    here = {*STORED, "icarl", "individual", "supsup", "exssnet", "ssnet", "packnet", "piggyback", "wsn"}
    assert here | elsewhere == general().keys()
