"""Every draw has an address: the same for the same seed and purpose, another for any other."""

import torch
from tests.core.networks import mlp

from exssnet.core.init import fresh_head, fresh_scores, signed_constant
from exssnet.core.network import MaskedNetwork
from exssnet.core.subnetwork import ScoredSubnetwork, WeightSubnetwork

LAYOUT = MaskedNetwork(mlp(), 0.3).layout


def head(seed=0, task="a", name="weight"):
    return fresh_head(torch.zeros(2, 40), 3, 40, seed, task, name)


def test_scores_differ_by_seed_and_task_and_weights_by_seed():
    scores = [fresh_scores(LAYOUT, seed, task) for seed, task in ((0, "a"), (0, "b"), (1, "a"))]
    weights = [signed_constant(LAYOUT, seed) for seed in (0, 1)]
    assert torch.equal(fresh_scores(LAYOUT, 0, "a"), scores[0])
    assert torch.equal(signed_constant(LAYOUT, 0), weights[0])
    for one, other in ((scores[0], scores[1]), (scores[0], scores[2]), (scores[1], scores[2]), weights):
        assert (one != other).double().mean() > 0.4


def test_heads_differ_by_seed_task_and_tensor():
    drawn = [head(), head(seed=1), head(task="b"), head(name="bias")]
    assert torch.equal(head(), drawn[0])
    assert all(not torch.equal(one, other) for i, one in enumerate(drawn) for other in drawn[:i])


def test_tasks_of_a_network_begin_with_heads_of_their_own():
    network = MaskedNetwork(mlp(), 0.3, head="task")
    one, two = (network.start_private(task, 2)["5.weight"].detach() for task in "ab")
    assert not torch.equal(one, two)


def test_what_is_trained_lies_in_the_mask_whatever_is_asked_for():
    network = MaskedNetwork(mlp(), 0.3)
    everything = torch.ones(network.layout.size, dtype=torch.bool)
    found = WeightSubnetwork(ScoredSubnetwork(network, "a", 2), everything)
    assert torch.equal(found.index, found.mask().nonzero().view(-1))
