import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from exssnet.data import load, split
from exssnet.data.benchmarks.cache import cached, fingerprint
from exssnet.data.dataset import digest_of
from exssnet.errors import DataError, InputError
from exssnet.io.disk import cache_folder


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.safetensors"))


def test_mnist_is_whole_and_two_loads_agree(mnist):
    assert mnist.train.images.shape == (60_000, 1, 28, 28)
    assert mnist.test.images.shape == (10_000, 1, 28, 28)
    assert mnist.class_names == [str(digit) for digit in range(10)]
    assert torch.bincount(mnist.train.labels)[0] == 5923
    again = load("ylecun/mnist")
    assert again.digests == mnist.digests
    assert again.digests["train"] == digest_of(mnist.train.images, mnist.train.labels)


def test_cifar100_is_whole_and_balanced(cifar100):
    assert cifar100.train.images.shape == (50_000, 3, 32, 32)
    assert cifar100.test.images.shape == (10_000, 3, 32, 32)
    assert torch.bincount(cifar100.train.labels).tolist() == [500] * 100
    assert torch.bincount(cifar100.test.labels).tolist() == [100] * 100
    assert cifar100.class_names[:2] == ["apple", "aquarium_fish"]
    assert len(split(cifar100, 20)[7].train) == 2500


def test_digits_are_split_in_the_same_stratified_way_every_time(digits):
    again = load("digits")
    assert again.digests == digits.digests
    assert len(digits.train) + len(digits.test) == 1797
    share = torch.bincount(digits.test.labels) / torch.bincount(torch.cat([digits.train.labels, digits.test.labels]))
    assert ((share > 0.24) & (share <= 0.25)).all()
    assert digits.train.images.max() == 16


def test_digits_are_normalised_by_their_own_train_part(digits):
    data = split(digits, 1)[0].train
    x, _ = data.batch(torch.arange(len(data)))
    assert x.mean().abs() < 1e-3
    assert (x.std() - 1).abs() < 1e-3


def test_decoding_gives_the_very_pixels_that_were_encoded(small_mnist):
    random = np.random.default_rng(1)
    pixels = random.integers(0, 256, (700, 28, 28), dtype=np.uint8)  # more than one chunk, several row groups
    labels = [int(label) for label in random.integers(0, 10, 700)]
    small_mnist(list(pixels), labels, group=300)
    found = load("mnist").train
    assert torch.equal(found.images[:, 0], torch.from_numpy(pixels))
    assert found.labels.tolist() == labels


def test_colour_images_keep_their_channels_and_grey_ones_become_colour(tmp_path, monkeypatch, write_parquet):
    monkeypatch.setenv("EXSSNET_DATA", str(tmp_path))
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    colour, grey = (random.integers(0, 256, (64, 64, *rest), dtype=np.uint8) for rest in ((3,), ()))
    for part in ("train", "valid"):
        write_parquet(
            tmp_path / f"zh-plus/tiny-imagenet/data/{part}-00000-of-00001-ab.parquet", [colour, grey], [0, 199]
        )
    dataset = load("tiny-imagenet")
    images = dataset.test.images
    assert torch.equal(images[0], torch.from_numpy(colour).permute(2, 0, 1))
    assert torch.equal(images[1], torch.from_numpy(grey).expand(3, -1, -1))
    assert dataset.classes == 200


def test_files_of_a_split_are_read_in_order_of_name(small_mnist, write_parquet):
    first = small_mnist()
    black = [np.zeros((28, 28), np.uint8)] * 3
    write_parquet(first.with_name("train-00001-of-00002.parquet"), black, [7, 7, 7])
    assert load("mnist").train.labels.tolist()[-3:] == [7, 7, 7]


def test_class_names_come_from_the_file(small_mnist):
    names = [f"digit {label}" for label in range(10)]
    small_mnist(names=names)
    assert load("mnist").class_names == names


def test_a_cache_hit_equals_a_fresh_decode(small_mnist, tmp_path):
    small_mnist()
    fresh, hit = load("mnist"), load("mnist")
    assert len(cache_files(tmp_path)) == 2
    assert torch.equal(fresh.train.images, hit.train.images)
    assert torch.equal(fresh.train.labels, hit.train.labels)
    assert fresh.digests == hit.digests


def test_a_replaced_source_file_is_decoded_again(small_mnist):
    small_mnist()
    before = load("mnist")
    small_mnist([np.zeros((28, 28), np.uint8)] * 3, [1, 2, 3])
    assert load("mnist").train.labels.tolist() == [1, 2, 3]
    assert len(before.train) == 40


def flip_a_pixel(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def drop_labels(file: Path) -> None:
    save_file({"inputs": load_file(file)["inputs"]}, file)


@pytest.mark.parametrize(
    "damage", [flip_a_pixel, truncate, drop_labels, lambda file: file.write_bytes(b""), Path.unlink]
)
def test_a_damaged_cache_is_made_again_without_a_word(small_mnist, tmp_path, damage):
    small_mnist()
    expected = load("mnist").digests
    for file in cache_files(tmp_path):
        damage(file)
    found = load("mnist")
    assert found.digests == expected
    assert digest_of(found.train.images, found.train.labels) == expected["train"]


def test_without_a_writable_cache_data_loads_with_one_warning_each(small_mnist, tmp_path, monkeypatch):
    small_mnist()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="set EXSSNET_CACHE to a writable folder") as caught:
        assert len(load("mnist").train) == 40
    assert len(caught) == 2  # train and test


WRITE_FOREVER = """
import sys, torch
from pathlib import Path
from exssnet.data.benchmarks.cache import write_tensors
tensors = {"inputs": torch.ones(64 << 20, dtype=torch.uint8), "labels": torch.zeros(4, dtype=torch.int64)}
while True:
    write_tensors(Path(sys.argv[1]), tensors, {"digest": "none"})
    Path(sys.argv[1]).unlink()
"""


def test_a_killed_writer_leaves_no_half_file(tmp_path):
    target = tmp_path / "images" / "x.safetensors"
    writer = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(target)])
    deadline = time.monotonic() + 30
    while not any(tmp_path.glob("images/*.partial")) and time.monotonic() < deadline:
        time.sleep(0.001)
    writer.kill()
    writer.wait()
    if target.exists():
        assert set(load_file(target)) == {"inputs", "labels"}
    images, labels = torch.ones(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    for left in tmp_path.glob("images/*.partial"):
        os.utime(left, (0, 0))  # as if it had been left long ago
    cached(target, lambda: (images, labels))
    assert os.listdir(target.parent) == [target.name]


def test_a_key_tells_files_apart_by_name_size_time_and_purpose(tmp_path):
    def key(name="a", content="xx", time=10**18, *purpose):
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, ns=(time, time))
        return fingerprint([tmp_path / name], *purpose)

    keys = [key(), key(name="b"), key(content="xxx"), key(time=10**18 + 1000), key("a", "xx", 10**18, "train")]
    assert key() == keys[0]
    assert len(set(keys)) == 5


def test_two_processes_that_decode_at_once_agree(small_mnist, tmp_path):
    small_mnist()
    program = "from exssnet.data import load; print(load('mnist').digests)"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate()[0] for process in both)
    assert first == second == f"{load('mnist').digests}\n"
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_the_cache_lies_where_the_user_says(monkeypatch):
    monkeypatch.setenv("EXSSNET_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("EXSSNET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/exssnet")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "exssnet"


GOOD = np.zeros((28, 28), np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        ([GOOD, b"not an image"], [0, 1], {}, "row 1: the image cannot be decoded"),
        ([GOOD, None], [0, 1], {}, "row 1: no image bytes"),
        ([GOOD, np.zeros((28, 30), np.uint8)], [0, 1], {}, "row 1: the image has 30×28 pixels"),
        ([GOOD, GOOD], [0, 10], {}, "row 1: label 10 is not in 0 to 9"),
        ([GOOD, GOOD], [-1, 0], {}, "row 0: label -1"),
        ([GOOD, GOOD], [0, None], {}, "row 1: label None"),
        ([GOOD], [0], {"columns": ("img", "label")}, "no column 'image'; it has img, label"),
        ([GOOD], [0], {"columns": ("image", "y")}, "no column 'label'"),
    ],
)
def test_a_wrong_row_is_named_with_its_file(small_mnist, images, labels, options, message):
    file = small_mnist(images, labels, **options)
    with pytest.raises(DataError, match=message) as caught:
        load("mnist")
    assert str(file) in str(caught.value)


def test_a_file_that_is_no_parquet_is_named(small_mnist):
    file = small_mnist()
    file.write_bytes(b"nothing")
    with pytest.raises(DataError, match=f"{file}: not readable as parquet"):
        load("mnist")


def test_a_mirror_without_the_split_says_so(small_mnist):
    small_mnist().unlink()
    with pytest.raises(DataError, match=r"no train-\*.parquet in .*ylecun/mnist"):
        load("mnist")


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(InputError, match="did you mean mnist"):
        load("minst")


def test_importing_the_room_imports_no_heavy_library():
    program = (
        "import sys, exssnet.data; "
        "print([m for m in ('pyarrow', 'sklearn', 'PIL', 'huggingface_hub', 'safetensors') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
