"""PackNet: what it prunes, what it goes on from, and what is left when no weight is free."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.methods.isolated import config, every_head, layers

from exssnet.core import reference
from exssnet.core.layout import Layer, Layout
from exssnet.experiments.prepare import prepare
from exssnet.methods.masks._subnetworks import largest_free
from exssnet.train import Trainer, accuracy


@given(st.data())
def test_the_largest_magnitudes_of_each_layer_are_kept_among_the_free(data):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    layout = Layout(tuple(Layer(str(i), (size,), 1, ends[i]) for i, size in enumerate(sizes)))
    levels = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 3.0])  # with ties, and free weights of zero
    weights = torch.tensor(data.draw(st.lists(levels, min_size=ends[-1], max_size=ends[-1])))
    free = torch.tensor(data.draw(st.lists(st.booleans(), min_size=ends[-1], max_size=ends[-1])))
    keep = tuple(data.draw(st.integers(1, size)) for size in sizes)
    kept = largest_free(weights, free, layout, keep)
    for size, start, count in zip(sizes, ends, keep, strict=False):
        indices = [i for i in range(start, start + size) if free[i]]
        wanted = sorted(indices, key=lambda i: (-abs(float(weights[i])), i))[:count]
        assert sorted(wanted) == [i for i in range(start, start + size) if kept[i]]


def test_packnet_prunes_the_smallest_of_what_the_task_trained():
    stream, method = prepare(config("packnet"))
    network = method.network
    Trainer(method, 0).learn(stream[0])
    used = network.bank.used.clone()
    phases = method.phases(stream[1])
    (values,) = next(phases).parameters
    assert len(values) == int((~used).sum())
    with torch.no_grad():
        values.copy_(torch.randn(len(values), generator=torch.Generator().manual_seed(0)))
    (left,) = next(phases).parameters
    mask, effective = method.subnetwork.mask(), lambda: network.layout.vector(method.subnetwork.weights())
    trained = network.weights.clone()
    trained[~used] = values.detach()
    pieces = (network.layout.slices(vector) for vector in (mask, used, trained))
    for m, u, w, count in zip(*pieces, network.keep, strict=True):
        assert bool(m[u].all())
        kept, pruned = w[m & ~u].abs(), w[~m].abs()
        assert len(kept) == count
        assert kept.min() >= pruned.max()
    assert torch.equal(left, trained[mask & ~used])  # it goes on from what the first phase left
    wanted = torch.where(mask, trained, 0)  # with what earlier tasks use, and without what was pruned
    assert torch.equal(effective(), wanted)
    with torch.no_grad():
        left += 1
    assert torch.equal(effective(), wanted + (mask & ~used))
    assert next(phases, None) is None
    method.end_task(stream[1])
    assert torch.equal(network.weights, torch.where(mask & ~used, trained + 1, network.weights))
    assert torch.equal(network.weights[used], trained[used])


def test_each_packnet_mask_holds_those_before_it_and_the_layers_share_of_new_weights():
    stream, method = prepare(config("packnet"))
    network, start = method.network, method.network.weights.clone()
    trainer = Trainer(method, 0)
    before = torch.zeros_like(network.bank.used)
    for index in range(3):
        trainer.learn(stream[index])
        mask = network.mask(f"task{index + 1}")
        assert bool(mask[before].all())
        new = layers(network, mask & ~before)
        assert [int(layer.sum()) for layer in new] == [*network.keep]
        before = mask
    assert torch.equal(network.weights[~network.bank.used], start[~network.bank.used])
    assert network.keep == tuple(reference.keep(layer.size, 0.1) for layer in network.layout.layers)
    assert method.storage()["weight_bits"] == 32 * 3 * sum(network.keep)


@every_head
def test_packnet_goes_on_without_a_free_weight(head):
    stream, method = prepare(config("packnet", head=head, tasks=5, density=0.4))
    for index in range(5):
        Trainer(method, 0).learn(stream[index])
    learned, share = method.network.tasks.values(), sum(method.network.keep)
    assert [t.trained_weights for t in learned] == [share, share, method.network.layout.size - 2 * share, 0, 0]
    assert method.verify().verified
    if head == "task":  # a head of its own over the weights of the others
        assert accuracy(lambda x: method.logits(x, "task5"), stream[4].test) > 70
