import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exssnet.core import reference
from exssnet.core.bank import Bank, pack, unpack
from exssnet.errors import InputError

sizes = st.integers(1, 200)


def random_masks(size, tasks, seed, density=0.3):
    draw = torch.Generator().manual_seed(seed)
    masks = [torch.rand(size, generator=draw) < density for _ in range(tasks)]
    for mask in masks:
        mask[0] = True  # a mask is never empty
    return masks


@given(sizes, st.integers(0, 2**31))
def test_packing_is_a_round_trip_at_one_bit_per_weight(size, seed):
    (mask,) = random_masks(size, 1, seed)
    packed = pack(mask)
    assert packed.dtype == torch.uint8
    assert len(packed) == (size + 7) // 8
    assert torch.equal(unpack(packed, size), mask)


@given(sizes, st.integers(1, 5), st.integers(0, 2**31))
def test_several_masks_are_unpacked_at_once_as_one_by_one(size, tasks, seed):
    masks, bank = random_masks(size, tasks, seed), Bank(size)
    for mask in masks:
        bank.add(mask)
    some = [*range(tasks), 0]
    assert torch.equal(bank.masks(some), torch.stack([masks[index] for index in some]))


@given(sizes, st.integers(1, 12), st.integers(0, 2**31))
def test_used_free_overlap_and_owners_follow_from_the_masks(size, tasks, seed):
    masks = random_masks(size, tasks, seed)
    bank = Bank(size)
    for number, mask in enumerate(masks):
        earlier = [[m] for m in masks[:number]]
        free = bank.free(mask)
        assert torch.equal(free, reference.free([mask], earlier)[0])
        assert not (free & bank.used).any()
        expected = reference.sparse_overlap([mask], earlier) if number else None
        assert bank.overlap(mask) == expected
        bank.add(mask)
        assert torch.equal(bank.used, torch.stack(masks[: number + 1]).any(0))
    owners = bank.owners()
    for weight in range(size):
        holders = [number for number, mask in enumerate(masks) if mask[weight]]
        assert int(owners[weight]) == (holders[0] if holders else -1)
    assert bank.free_count == int((~bank.used).sum())
    assert bank.bits == size * tasks


def test_overlap_of_independent_masks_is_near_one_minus_free_share_to_the_tasks():
    size, density = 200_000, 0.1
    bank = Bank(size)
    overlaps = []
    for number in range(5):
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(number))[: int(size * density)]
        mask = torch.zeros(size, dtype=torch.bool)
        mask[chosen] = True
        overlaps.append(bank.overlap(mask))
        bank.add(mask)
    assert overlaps[0] is None
    for i, overlap in enumerate(overlaps[1:], start=2):
        assert overlap == pytest.approx(1 - (1 - density) ** (i - 1), abs=0.01)
    assert sum(overlaps[1:]) / 4 == pytest.approx(0.226, abs=0.005)  # the specification's 22.6 %


def test_loading_gives_the_same_bank():
    bank = Bank(77)
    for mask in random_masks(77, 4, 1):
        bank.add(mask)
    again = Bank(77)
    again.load([bank.packed(i) for i in range(4)])
    assert torch.equal(again.used, bank.used)
    assert all(torch.equal(again.mask(i), bank.mask(i)) for i in range(4))


@pytest.mark.parametrize("mask", [torch.ones(9), torch.ones(10, dtype=torch.bool)])
def test_a_mask_of_another_kind_or_size_is_refused(mask):
    with pytest.raises(InputError, match="a mask must be 9 bools"):
        Bank(9).add(mask)
