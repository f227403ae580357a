"""Encoded images to pixels: helper processes give what this process gives, whatever becomes of them."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from exssnet.data import pixels
from exssnet.errors import DataError

SHAPE = (3, 8, 6)


@pytest.fixture(scope="module")
def encoded():
    noise = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), np.uint8)
    files = []
    for image in noise:
        file = BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
        files.append(file.getvalue())
    return noise, files


@pytest.fixture
def two_helpers(monkeypatch):
    monkeypatch.setattr(pixels, "WORTH", 20)
    monkeypatch.setattr(pixels.os, "sched_getaffinity", lambda _: {0, 1})
    started = []
    start = pixels._start
    monkeypatch.setattr(pixels, "_start", lambda: started.append(start()) or started[-1])
    return started


def by_pieces(decode, threads, files):
    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(
            list(pool.map(lambda at: decode(files[at : at + 5], SHAPE, "file", at), range(0, len(files), 5)))
        )


def test_helpers_give_the_same_pixels(encoded, two_helpers):
    noise, files = encoded
    with pixels.decoder(len(files), SHAPE) as (decode, threads):
        assert np.array_equal(by_pieces(decode, threads, files), noise)
    assert len(two_helpers) == threads == 2
    assert all(helper.poll() is not None for helper in two_helpers)  # none is left behind


def test_a_helper_that_dies_costs_nothing_but_time(encoded, two_helpers):
    noise, files = encoded
    with pixels.decoder(len(files), SHAPE) as (decode, threads):
        two_helpers[0].kill()
        two_helpers[0].wait()
        assert np.array_equal(by_pieces(decode, threads, files), noise)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"no image", r"file, row 7: the image cannot be decoded"),
        (None, r"file, row 7: no image bytes"),
    ],
)
def test_a_damaged_image_is_named_by_whoever_decodes_it(encoded, two_helpers, damaged, message):
    files = [*encoded[1]]
    files[7] = damaged
    with pixels.decoder(len(files), SHAPE) as (decode, threads), pytest.raises(DataError, match=message):
        by_pieces(decode, threads, files)


def test_few_or_large_images_need_no_helper(two_helpers):
    with pixels.decoder(39, SHAPE) as (decode, threads):
        assert (decode, threads) == (pixels.decode, 1)
    with pixels.decoder(10_000, (3, 64, 64)) as (decode, threads):
        assert (decode, threads) == (pixels.decode, 2)
    assert not two_helpers
