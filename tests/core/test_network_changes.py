"""A network that tasks are taken out of and brought into: nothing that another task reads ever changes."""

import hashlib
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.networks import mlp
from torch import Tensor, nn

from exssnet import ForgettingError, InputError
from exssnet.core import changes
from exssnet.core.network import MaskedNetwork
from exssnet.core.proof import tensor_digest
from exssnet.models import build

X = torch.randn(5, 12, generator=torch.Generator().manual_seed(5))


def network(seed: int = 0, **options) -> MaskedNetwork:
    torch.manual_seed(0)
    return MaskedNetwork(mlp(), 0.3, seed, **({"init": "hashed", "head": "task"} | options))


def learn(net: MaskedNetwork, name: str, draw: int, share: float = 0.3, classes: int = 2, **facts) -> None:
    """A task with a mask, weights and private tensors by chance: what counts here is where they go."""
    chance = torch.Generator().manual_seed(draw)
    mask = torch.rand(net.layout.size, generator=chance) < share
    index = net.bank.free(mask).nonzero().view(-1)
    own = net.start_private(name, classes)
    own |= {key: torch.rand(t.shape, generator=chance) for key, t in own.items() if t.is_floating_point()}
    net.commit(name, classes, mask, index, torch.randn(len(index), generator=chance), own, **facts)


def logits(net: MaskedNetwork) -> dict[str, Tensor]:
    return {name: net.logits(X, name) for name in net.tasks}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- First weights -------------------------------------------------------------------------------------------


def test_hashed_weights_are_bits_of_shake_256_of_the_seed_scaled_by_layer():
    net = network(seed=7)
    stream = hashlib.shake_256(b"exssnet weights 7").digest(net.layout.size // 8 + 1)
    for layer in net.layout.layers:
        for place in range(layer.start, layer.start + layer.size):
            sign = 1 if stream[place // 8] >> place % 8 & 1 else -1
            value = torch.tensor(sign * math.sqrt(2 / layer.fan_in), dtype=torch.float32)
            assert net.weights[place] == value


def test_hashed_weights_are_the_same_in_every_version_of_every_library():
    net = MaskedNetwork(build("lenet-300-100", (28, 28), 2, 0.1), seed=3, init="hashed", head="task")
    assert tensor_digest(net.weights) == "6c4dfed2701cc0368964c07216193ac8a9ba89e701de60e7431f9b16280a3fc9"


def test_hashed_weights_do_not_depend_on_the_module_s_own_or_on_torch_s_seed():
    first = network().weights
    torch.manual_seed(99)
    assert torch.equal(MaskedNetwork(mlp(), 0.3, 0, init="hashed", head="task").weights, first)
    assert not torch.equal(network(seed=1).weights, first)


# --- Removing ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.02, 0.6), min_size=1, max_size=5), st.data())
@settings(max_examples=40)
def test_removing_frees_exactly_what_no_other_task_reads(shares: list[float], data: st.DataObject):
    net = network()
    first = net.weights.clone()
    for number, share in enumerate(shares):
        learn(net, f"task{number}", number, share)
    while net.tasks:
        gone = data.draw(st.sampled_from(list(net.tasks)))
        before, weights = logits(net), net.weights.clone()
        digests = {name: task.digest for name, task in net.tasks.items()}
        masks = {name: net.mask(name) for name in net.tasks}
        changes.remove(net, gone, first)
        del before[gone], digests[gone], masks[gone]
        for place in range(net.layout.size):  # the plain loop
            read = any(mask[place] for mask in masks.values())
            assert net.weights[place] == (weights[place] if read else first[place])
            assert bool(net.bank.used[place]) == read
        assert same(logits(net), before)
        assert {name: task.digest for name, task in net.tasks.items()} == digests
        assert net.verify().changed == ()
    assert torch.equal(net.weights, first)
    assert net.bank.free_count == net.bank.size


def test_a_task_learned_into_freed_weights_disturbs_nobody_and_may_have_the_old_name():
    net = network()
    first = net.weights.clone()
    for number in range(3):
        learn(net, f"task{number}", number)
    old = net.logits(X, "task1")
    changes.remove(net, "task1", first)
    before = logits(net)
    free = net.bank.free_count
    learn(net, "task1", 77)
    assert net.bank.free_count < free
    assert not torch.equal(net.logits(X, "task1"), old)
    assert same({name: net.logits(X, name) for name in before}, before)
    assert net.verify().changed == ()


def test_removing_what_is_not_there_changes_nothing():
    net = network()
    learn(net, "a", 1)
    before = net.weights.clone()
    with pytest.raises(InputError, match="no task 'b' has been learned"):
        changes.remove(net, "b", before)
    assert torch.equal(net.weights, before)
    assert list(net.tasks) == ["a"]


# --- Tasks from elsewhere ------------------------------------------------------------------------------------


def adopt(net: MaskedNetwork, other: MaskedNetwork, task: str) -> None:
    masked = torch.cat([tensor.reshape(-1) for tensor in other.effective(task).values()])
    changes.adopt(net, other.task(task).card(), other.mask(task), masked, other.task(task).private)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.05, 0.6)), min_size=1, max_size=4), st.floats(0.05, 0.6))
@settings(max_examples=40)
def test_an_adopted_task_computes_what_it_computed_at_home_and_no_other_task_changes(here, share: float):
    net, home = network(), network()
    learn(home, "before", 500, 0.2)
    learn(home, "guest", 501, share, classes=3)
    wanted = home.logits(X, "guest")
    for number, (late, own) in enumerate(here):
        if not late:
            learn(net, f"task{number}", number, own)
    before = logits(net)
    adopt(net, home, "guest")
    assert same(logits(net), before | {"guest": wanted})
    for number, (late, own) in enumerate(here):
        if late:
            learn(net, f"task{number}", number, own)
    before = logits(net)
    assert torch.equal(before["guest"], wanted)
    assert net.task("guest").digest == home.task("guest").digest
    assert net.verify().changed == ()

    again = network()
    changes.load_state(again, *changes.state(net))
    assert same(logits(again), before)
    assert again.verify().changed == ()
    first = network().weights
    for name in list(net.tasks):
        if name != "guest":
            changes.remove(net, name, first)
            assert torch.equal(net.logits(X, "guest"), wanted)


def test_only_weights_with_another_value_here_are_overridden():
    home = network()
    learn(home, "guest", 1)
    empty = network()
    adopt(empty, home, "guest")
    assert empty.task("guest").override is None
    twin = network()
    learn(twin, "twin", 1)  # the same mask and weights
    adopt(twin, home, "guest")
    assert twin.task("guest").override is None
    assert (twin.task("guest").overlap, twin.task("guest").trained_weights) == (1.0, 0)
    full = network()
    learn(full, "all", 2, share=1.1)
    adopt(full, home, "guest")
    places, values = full.task("guest").override
    assert torch.equal(places, home.mask("guest").nonzero().view(-1))
    assert torch.equal(values, home.weights[places])


def test_a_weight_that_a_guest_has_a_value_of_its_own_for_is_freed_with_its_owner():
    home, net = network(), network()
    first = net.weights.clone()
    learn(home, "guest", 1)
    learn(net, "all", 2, share=1.1)
    adopt(net, home, "guest")
    wanted = net.logits(X, "guest")
    assert len(net.task("guest").override[0]) == int(home.mask("guest").sum())
    changes.remove(net, "all", first)
    assert torch.equal(net.weights, first)  # nobody reads a shared one
    assert torch.equal(net.logits(X, "guest"), wanted)


def test_a_change_of_what_is_overridden_is_noticed():
    home, net = network(), network()
    learn(home, "guest", 1)
    learn(net, "all", 2, share=1.1)
    adopt(net, home, "guest")
    net.task("guest").override[1][3] += 1
    assert {task for task, _ in net.verify().changed} == {"guest"}
    with pytest.raises(ForgettingError, match="guest"):
        learn(net, "next", 3)


def test_a_name_that_is_taken_is_not_adopted():
    home, net = network(), network()
    learn(home, "guest", 1)
    learn(net, "guest", 2)
    before = logits(net)
    with pytest.raises(InputError, match="'guest' has been learned already"):
        adopt(net, home, "guest")
    assert same(logits(net), before)


# --- Cache ---------------------------------------------------------------------------------------------------


def test_the_cache_holds_as_many_tasks_as_it_has_room_for_those_run_last(monkeypatch):
    net = network()
    for number in range(5):
        learn(net, f"task{number}", number)
    before = logits(net)
    size = net.layout.size * 4
    made: list[str] = []
    real = net.effective_vector
    monkeypatch.setattr(net, "effective_vector", lambda learned: made.append(learned.name) or real(learned))
    for room in (0, size, 3 * size, 10 * size):
        net.cache.clear()
        net.cache.bytes = room
        held: list[str] = []
        for name in ["task4", *net.tasks, "task1", "task3", "task1", "task0"]:
            made.clear()
            assert torch.equal(net.logits(X, name), before[name])
            assert made == ([] if name in held else [name])
            held = [*(other for other in held if other != name), name][-max(1, room // size) :]


def test_a_task_that_is_not_there_is_refused_by_name():
    net = network()
    learn(net, "task0", 0)
    for ask in (net.mask, net.effective, net.tensors, net.bake, lambda name: net.logits(X, name)):
        with pytest.raises(InputError, match="no task 'other' has been learned"):
            ask("other")


def test_an_answer_in_inference_mode_leaves_nothing_that_fails_outside_of_it():
    net = network()
    learn(net, "task0", 0)
    before = logits(net)["task0"]
    net.cache.clear()
    with torch.inference_mode():
        assert torch.equal(net.logits(X, "task0"), before)
    assert torch.equal(net.logits(X, "task0"), before)


def test_the_cache_never_answers_for_a_task_of_the_same_name_that_is_gone():
    net = network()
    net.cache.bytes = 2**20
    first = net.weights.clone()
    for number in range(3):
        learn(net, f"task{number}", number)
    old = logits(net)
    changes.remove(net, "task0", first)
    learn(net, "task0", 50)
    plain = network()
    changes.load_state(plain, *changes.state(net))
    assert same(logits(net), logits(plain))
    assert not torch.equal(net.logits(X, "task0"), old["task0"])


def test_the_cache_never_answers_with_weights_that_a_later_task_has_changed():
    """SSNeT trains weights that earlier tasks use: what it does to them must show at once."""
    net = network()
    net.cache.bytes = 2**20
    learn(net, "task0", 0)
    before = logits(net)["task0"]  # now its weights are in the cache
    mask = net.mask("task0")
    index = mask.nonzero().view(-1)
    net.commit("task1", 2, mask, index, -net.weights[index], net.start_private("task1", 2), exclusive=False)
    plain = network()
    changes.load_state(plain, *changes.state(net))
    assert not torch.equal(plain.logits(X, "task0"), before)
    assert same(logits(net), logits(plain))


def test_threads_that_ask_for_different_tasks_get_their_own_answers():
    net = network()
    for number in range(4):
        learn(net, f"task{number}", number)
    before = logits(net)
    wrong: list[str] = []

    def ask(name: str) -> None:
        torch.set_num_threads(1)
        wrong.extend(name for _ in range(100) if not torch.equal(net.logits(X, name), before[name]))

    threads = [threading.Thread(target=ask, args=(name,)) for name in before]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_density_of_the_next_masks_can_be_changed_and_a_bad_one_is_refused():
    net = network()
    net.set_density(0.05)
    assert [keep / layer.size for keep, layer in zip(net.keep, net.layout.layers, strict=True)] == pytest.approx(
        [0.05, 0.05], abs=0.01
    )
    with pytest.raises(InputError, match=r"density is 1\.5"):
        net.set_density(1.5)
    assert net.density == 0.05


def test_a_module_s_own_weights_are_what_removing_goes_back_to():
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 2))
    net = MaskedNetwork(module, 0.3, init="keep", head="task", private=("bias",))
    assert torch.equal(net.weights, module[0].weight.detach().reshape(-1))
    first = net.weights.clone()
    learn(net, "a", 1)
    changes.remove(net, "a", first)
    assert torch.equal(net.weights, first)


def test_a_task_that_is_refused_because_an_earlier_one_changed_leaves_the_weights_and_every_later_one_is_refused():
    net = network()
    for number in range(2):
        learn(net, f"task{number}", number)
    used = net.bank.used.nonzero().view(-1)[0]
    net.weights[used] += 1
    before = net.weights.clone()
    for attempt in range(3):
        with pytest.raises(ForgettingError, match="changed after it was learned"):
            learn(net, f"new{attempt}", 7 + attempt)
        assert torch.equal(net.weights, before)
        assert list(net.tasks) == ["task0", "task1"]
    net.weights[used] -= 1
    learn(net, "new", 9)
