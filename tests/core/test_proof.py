"""What a digest is of; and damage to what is stored for any one of many tasks is found while others are learned."""

import hashlib
import struct
from math import ceil

import pytest
import torch
from torch import Tensor, nn

from exssnet import ForgettingError, randomness
from exssnet.core import changes
from exssnet.core.network import MaskedNetwork
from exssnet.core.proof import STORED_CHECKS, combined_digest, tensor_digest

MANY = 100
BOUND = ceil(MANY / STORED_CHECKS) + 1  # further tasks within which damage must be found


def test_a_digest_is_sha_256_of_type_shape_and_bytes():
    """By hand, since model directories hold such digests; so -0.0 is not 0.0, and a reshaped tensor another one."""
    numbers = (1.5, -0.0, 3e-40)
    for shape in [(3,), (1, 3), (3, 1)]:
        wanted = hashlib.sha256(f"torch.float32 {shape} ".encode() + struct.pack("<3f", *numbers)).hexdigest()
        assert tensor_digest(torch.tensor(numbers).view(shape)) == wanted
    turned = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).T  # not in the order of memory
    assert tensor_digest(turned) == hashlib.sha256(b"torch.int16 (2, 2) " + struct.pack("<4h", 1, 3, 2, 4)).hexdigest()
    wanted = hashlib.sha256(b"a 1\nb 2\n").hexdigest()
    assert combined_digest({"a": "1", "b": "2"}) == combined_digest({"b": "2", "a": "1"}) == wanted


def network() -> MaskedNetwork:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    return MaskedNetwork(module, 0.3, head="task")


def learn(net: MaskedNetwork, name: str) -> None:
    """A task with a mask, weights and private tensors by chance."""
    chance = randomness.generator(0, name)
    mask = torch.rand(net.layout.size, generator=chance) < 0.3
    mask[int(torch.randint(net.layout.size, (), generator=chance))] = True
    index = net.bank.free(mask).nonzero().view(-1)
    own = {key: torch.rand(t.shape, generator=chance) for key, t in net.start_private(name, 2).items()}
    net.commit(name, 2, mask, index, torch.randn(len(index), generator=chance), own)


def learned(tasks: int) -> MaskedNetwork:
    net = network()
    for number in range(tasks):
        learn(net, f"task{number}")
    return net


def copied(state: tuple[dict[str, Tensor], list[dict]]) -> tuple[dict[str, Tensor], list[dict]]:
    return {name: tensor.clone() for name, tensor in state[0].items()}, state[1]


def of_bits(net: MaskedNetwork, victim: int) -> None:
    net.bank.packed(victim)[0] ^= 1


def of_private_tensors(net: MaskedNetwork, victim: int) -> None:
    own = net.tasks[f"task{victim}"].private
    own[sorted(own)[victim % len(own)]].view(-1)[0] += 1


def tasks_until_found(net: MaskedNetwork, victim: int) -> int:
    for further in range(1, BOUND + 1):
        try:
            learn(net, f"further{further}")
        except ForgettingError as error:
            named = f"task 'task{victim}' changed after it was learned" in str(error)
            return further if named else BOUND + 1
    return BOUND + 1


@pytest.fixture(scope="module")
def state() -> tuple[dict[str, Tensor], list[dict]]:
    return changes.state(learned(MANY))


@pytest.mark.parametrize("damage", [of_bits, of_private_tensors])
def test_damage_to_any_task_is_found_within_a_rotation_through_all(damage, state):
    late = {}
    for victim in range(MANY):
        net = network()
        changes.load_state(net, *copied(state))
        for number in range(1 + victim % BOUND):  # at any point of a rotation
            learn(net, f"between{number}")
        damage(net, victim)
        found = tasks_until_found(net, victim)
        if found > BOUND:
            late[victim] = found
    assert late == {}


@pytest.mark.parametrize("damage", [of_bits, of_private_tensors])
@pytest.mark.parametrize("victim", [0, 31, 32, 40, 63, 64, 98, 99])
def test_damage_is_found_in_a_network_that_was_never_loaded(damage, victim):
    net = learned(MANY)
    damage(net, victim)
    assert tasks_until_found(net, victim) <= BOUND


@pytest.mark.parametrize("damage", [of_bits, of_private_tensors])
def test_after_a_load_the_next_task_finds_any_damage(damage, state):
    """However often a run is resumed, nothing waits longer for it."""
    net = learned(40)
    for victim in range(0, MANY, 7):
        changes.load_state(net, *copied(state))  # into a network whose rotation is elsewhere
        damage(net, victim)
        assert tasks_until_found(net, victim) == 1


@pytest.mark.parametrize("damage", [of_bits, of_private_tensors])
def test_damage_is_found_while_tasks_come_and_go(damage, state):
    first = network().weights
    for victim in range(3, MANY, 5):
        net = network()
        changes.load_state(net, *copied(state))
        for number in range(2):
            learn(net, f"between{number}")
            changes.remove(net, f"task{(victim + 1 + number) % MANY}", first)
        place = list(net.tasks).index(f"task{victim}")
        if damage is of_bits:
            net.bank.packed(place)[0] ^= 1
        else:
            damage(net, victim)
        assert tasks_until_found(net, victim) <= BOUND


def test_of_many_tasks_only_some_are_read_again_each_time(monkeypatch):
    net, read = learned(MANY), []
    digest = net.proof.stored_digest
    monkeypatch.setattr(net.proof, "stored_digest", lambda task: read.append(task.name) or digest(task))
    learn(net, "further")
    assert len(set(read) - {"further"}) < MANY / 2
