import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from exssnet.data import Dataset, LazyImages, image_folder, load, permuted, split
from exssnet.data.benchmarks.lazy import _crop_box, centre
from exssnet.errors import DataError


def smooth(label: int, number: int, width: int, height: int) -> Image.Image:
    """A ramp in a class's own colours: resampling keeps it nearly as it is."""
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    channels = [255 * across, 255 * down, np.full_like(across, 20 * label + number)]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for part, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(["ant", "bee", "cat", "dog"]):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = smooth(label, number, 300 + 10 * number, 260)
                image.save(root / part / name / f"{number}.{'png' if number else 'JPEG'}", quality=95)
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    return root


@pytest.fixture
def imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_parquet) -> Dataset:
    monkeypatch.setenv("EXSSNET_DATA", str(tmp_path / "mirror"))
    monkeypatch.setenv("EXSSNET_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "mirror/ILSVRC/imagenet-1k/data"
    images = [np.asarray(smooth(0, number, 250, 240)) for number in range(12)]
    labels = [0, 1, 999, 2] * 3
    write_parquet(home / "train-00000-of-00002.parquet", images[:7], labels[:7], group=3)
    write_parquet(home / "train-00001-of-00002.parquet", images[7:], labels[7:], group=3)
    write_parquet(home / "validation-00000-of-00001.parquet", images[:4], labels[:4])
    return load("imagenet")


def blue(x: torch.Tensor) -> list[int]:
    """The number that `smooth` painted into the third channel."""
    return (x[:, 2].mean((1, 2)) * 0.225 + 0.406).mul(255).round().long().tolist()


def test_a_folder_gives_every_image_under_its_class(folder):
    stream = split(image_folder(folder), 2)
    assert stream.input_shape == (3, 224, 224)
    for task in stream:
        x, y = task.train.batch(torch.arange(len(task.train)))
        assert x.shape == (10, 3, 224, 224)
        assert x.dtype == torch.float32
        expected = [20 * task.classes[int(label)] + number for label in (0, 1) for number in range(5)]
        assert blue(x) == pytest.approx(expected, abs=2)
        assert y.tolist() == [0] * 5 + [1] * 5
        assert len(task.test) == 4


def test_parquet_rows_are_found_across_files_and_row_groups(imagenet):
    data = split(imagenet, 2, [0, 1, 2, 999])[1].train
    x, y = data.batch(torch.tensor([5, 0, 3]))
    assert y.tolist() == [1, 0, 1]
    assert blue(x) == pytest.approx([10, 3, 2], abs=1)


def test_parquet_is_unpacked_only_when_a_batch_needs_it_and_only_once(imagenet, tmp_path):
    data = split(imagenet, 2, [0, 1, 2, 999])[0].train
    packs = tmp_path / "cache" / "packs"
    assert not packs.exists()
    first, _ = data.batch(torch.arange(2))
    written = {file: file.stat().st_mtime_ns for file in packs.iterdir()}
    again, _ = split(load("imagenet"), 2, [0, 1, 2, 999])[0].train.batch(torch.arange(2))
    assert torch.equal(first, again)
    assert {file: file.stat().st_mtime_ns for file in packs.iterdir()} == written


def test_a_damaged_pack_is_made_again(imagenet, tmp_path):
    index = torch.arange(6)
    expected, _ = split(imagenet, 2, [0, 1, 2, 999])[0].train.batch(index)
    for file in (tmp_path / "cache" / "packs").iterdir():
        file.write_bytes(file.read_bytes()[:-50])
    found, _ = split(load("imagenet"), 2, [0, 1, 2, 999])[0].train.batch(index)
    assert torch.equal(found, expected)


def test_a_lazy_stream_survives_being_sent_to_another_process(imagenet):
    stream = split(imagenet, 2, [0, 1, 2, 999])
    sent = pickle.loads(pickle.dumps(stream))
    index = torch.arange(6)
    assert torch.equal(sent[1].train.batch(index)[0], stream[1].train.batch(index)[0])


def test_imagenet_has_its_thousand_classes(imagenet):
    assert imagenet.classes == 1000
    with pytest.raises(DataError, match="task 2 of split-imagenet has training examples of fewer than two classes"):
        split(imagenet, 10, range(1000))  # this one has images of few of them


def test_the_same_generator_seed_gives_the_same_crops_and_no_generator_the_centre(folder):
    data = split(image_folder(folder), 2)[0].train
    index = torch.arange(6)

    def drawn(seed: int) -> torch.Tensor:
        return data.batch(index, torch.Generator().manual_seed(seed))[0]

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(data.batch(index)[0], data.batch(index)[0])


def test_one_images_crop_does_not_depend_on_the_others_in_its_batch(folder):
    data = split(image_folder(folder), 2)[0].train
    one, _ = data.batch(torch.tensor([3, 0]), torch.Generator().manual_seed(1))
    other, _ = data.batch(torch.tensor([3, 4]), torch.Generator().manual_seed(1))
    assert torch.equal(one[0], other[0])


def test_the_centre_equals_resizing_to_256_and_cropping_224():
    image = smooth(1, 1, 341, 256)
    left = (341 - 224) / 2
    reference = image.crop((round(left), 16, round(left) + 224, 240))
    difference = np.abs(np.asarray(centre(image), int) - np.asarray(reference, int))
    assert difference.max() <= 2


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_every_random_crop_lies_inside_its_image(width, height, seed):
    left, top, right, bottom = _crop_box(width, height, np.random.default_rng(seed).random((10, 4)))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_crops_have_the_usual_areas_and_proportions():
    boxes = np.array([_crop_box(500, 400, np.random.default_rng(s).random((10, 4))) for s in range(2000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, ratio = width * height / 200_000, width / height
    assert area.min() == pytest.approx(0.08, abs=0.01)
    assert area.max() > 0.9
    assert ratio.min() == pytest.approx(3 / 4, abs=0.02)
    assert ratio.max() == pytest.approx(4 / 3, abs=0.02)


def test_lazy_images_can_be_permuted_too(folder):
    task = permuted(image_folder(folder), 2, seed=0)[1]
    assert isinstance(task.train, LazyImages)
    plain = split(image_folder(folder), 1)[0].train.batch(torch.tensor([0]))[0]
    moved = task.train.batch(torch.tensor([0]))[0]
    assert torch.equal(moved.flatten().sort().values, plain.flatten().sort().values)
    assert not torch.equal(moved, plain)


def test_real_photographs_from_a_folder_keep_their_look(tmp_path, cifar100):
    for part, source in (("train", cifar100.train), ("val", cifar100.test)):
        for label in range(2):
            home = tmp_path / part / cifar100.class_names[label]
            home.mkdir(parents=True)
            for row in (source.labels == label).nonzero()[:3, 0].tolist():
                Image.fromarray(source.images[row].permute(1, 2, 0).numpy()).save(home / f"{row}.png")
    data = split(image_folder(tmp_path), 1)[0].train
    x, _ = data.batch(torch.arange(6))
    row = int((cifar100.train.labels == 0).nonzero()[0, 0])
    middle = cifar100.train.images[row, :, 2:30, 2:30].float().mean((1, 2)) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    first = sorted(path.name for path in (tmp_path / "train" / cifar100.class_names[0]).iterdir())
    place = first.index(f"{row}.png")
    torch.testing.assert_close(x[place].mean((1, 2)), (middle - mean) / std, atol=0.05, rtol=0)


def test_a_damaged_image_is_named_when_it_is_read(tmp_path, folder):
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "1.jpg").write_bytes(b"damaged")
    data = split(image_folder(tmp_path), 1)[0].train
    with pytest.raises(DataError, match=r"train/a/1.jpg: the image cannot be decoded"):
        data.batch(torch.tensor([0]))


def test_a_folder_that_is_not_laid_out_for_classes_says_why(tmp_path, folder):
    with pytest.raises(DataError, match="expected a folder for each class"):
        image_folder(tmp_path / "nowhere")
    for name in ("train/a", "train/b", "val/a"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(DataError, match="class b is missing in train or val"):
        image_folder(tmp_path)
    (tmp_path / "val/b").mkdir()
    with pytest.raises(DataError, match="no images"):
        image_folder(tmp_path)
