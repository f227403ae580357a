import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exssnet.data import HorizontalFlip, Normalize, Permute, Pipeline, RandomCrop, Rotate


def images(count: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (count, channels, height, width), generator=draw, dtype=torch.uint8)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


sizes = st.tuples(*[st.integers(1, 5), st.integers(1, 3), st.integers(2, 9), st.integers(2, 9)])


@given(sizes, st.integers(0, 4), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_crop_equals_padding_and_slicing_each_image(size, padding, seed):
    x = images(*size)
    cropped = RandomCrop(padding)(x, seeded(seed))
    corners = torch.randint(2 * padding + 1, (2, len(x), 1), generator=seeded(seed))[..., 0].T.tolist()
    for image, result, (top, left) in zip(x, cropped, corners, strict=True):
        black = torch.zeros(size[1], size[2] + 2 * padding, size[3] + 2 * padding, dtype=torch.uint8)
        black[:, padding : padding + size[2], padding : padding + size[3]] = image
        assert torch.equal(result, black[:, top : top + size[2], left : left + size[3]])


def test_crops_reach_every_corner_and_no_further():
    x = images(2000, 1, 4, 4)
    uncovered = (RandomCrop(1)(x, seeded(0)) == 0).float().mean(0)[0]
    assert uncovered[0, 0] == pytest.approx(5 / 9, abs=0.05)
    assert (uncovered[1:3, 1:3] == 0).all()


@given(sizes, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_flip_equals_reversing_each_chosen_image(size, seed):
    x = images(*size)
    flipped = HorizontalFlip()(x, seeded(seed))
    chosen = torch.rand(len(x), generator=seeded(seed)) < 0.5
    for image, result, turn in zip(x, flipped, chosen, strict=True):
        reference = torch.stack([row.flip(0) for row in image.flatten(0, 1)]).view_as(image) if turn else image
        assert torch.equal(result, reference)


def test_without_a_generator_nothing_is_augmented():
    x = images(8, 3, 8, 8)
    assert torch.equal(Pipeline((RandomCrop(4), HorizontalFlip()))(x, None), x)


def test_the_same_generator_seed_gives_the_same_batch_and_another_seed_another():
    x, augment = images(8, 3, 8, 8), Pipeline((RandomCrop(4), HorizontalFlip()))
    assert torch.equal(augment(x, seeded(1)), augment(x, seeded(1)))
    assert not torch.equal(augment(x, seeded(1)), augment(x, seeded(2)))


@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_permutation_loses_no_pixel_and_its_inverse_restores_the_image(side, channels, seed):
    x = images(2, channels, side, side)
    order = torch.randperm(side * side, generator=seeded(seed))
    moved = Permute(order)(x, None)
    assert moved.shape == x.shape
    assert torch.equal(Permute(order.argsort())(moved, None), x)
    assert torch.equal(moved[0, 0].flatten(), x[0, 0].flatten()[order])


def test_permutation_of_vectors_moves_features():
    x = torch.arange(6.0).view(2, 3)
    assert Permute(torch.tensor([2, 0, 1]))(x, None).tolist() == [[2, 0, 1], [5, 3, 4]]


def test_rotation_by_zero_is_the_identity():
    x = images(3, 1, 28, 28)
    assert torch.equal(Rotate(0)(x, None), x)


@pytest.mark.parametrize("quarters", [1, 2, 3, 5])
@pytest.mark.parametrize("side", [8, 9, 28])
def test_rotation_by_quarter_turns_equals_rot90(quarters, side):
    x = images(2, 3, side, side)
    expected = torch.rot90(x, quarters, (-2, -1)).float()
    torch.testing.assert_close(Rotate(90 * quarters)(x, None), expected, atol=0.05, rtol=0)


def test_half_a_turn_of_an_oblong_image_keeps_its_proportions():
    x = images(2, 1, 6, 10)
    torch.testing.assert_close(Rotate(180)(x, None), torch.rot90(x, 2, (-2, -1)).float(), atol=0.05, rtol=0)


def test_a_small_rotation_keeps_the_middle_and_blackens_the_corners():
    turned = Rotate(45)(torch.full((1, 1, 28, 28), 200, dtype=torch.uint8), None)[0, 0]
    assert turned[13:15, 13:15].tolist() == [[200, 200], [200, 200]]
    assert turned[[0, 0, -1, -1], [0, -1, 0, -1]].tolist() == [0, 0, 0, 0]


def test_normalisation_gives_what_the_formula_gives_per_channel():
    x = images(4, 3, 5, 5)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    result = Normalize.channels(1 / 255, mean, std)(x, None)
    assert result.dtype == torch.float32
    for channel in range(3):
        expected = (x[:, channel].double() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(result[:, channel], expected.float())
