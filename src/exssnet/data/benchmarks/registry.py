"""Named data sets: source, layout, scaling and augmentation."""

from __future__ import annotations

from dataclasses import dataclass

from exssnet.data.transforms import HorizontalFlip, Normalize, RandomCrop, Transform
from exssnet.errors import unknown

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Source:
    """One data set. Columns and splits have the hub's names."""

    name: str
    shape: tuple[int, int, int]  # channels, height, width as stored
    classes: int
    mean: tuple[float, ...]  # per channel, after `scale`
    std: tuple[float, ...]
    scale: float = 1 / 255
    augment: tuple[Transform, ...] = ()
    hub_id: str | None = None  # None: part of an installed package
    image_column: str = "image"
    label_column: str = "label"
    train_split: str = "train"
    test_split: str = "test"
    lazy: bool = False  # too large for one tensor: decoded batch by batch

    def normalize(self) -> Normalize:
        return Normalize.channels(self.scale, self.mean, self.std)


SOURCES = (
    # mean and std of the train part; tests/data/test_sources.py recomputes them
    Source("digits", (1, 8, 8), 10, mean=(0.3057,), std=(0.3763,), scale=1 / 16),
    Source("mnist", (1, 28, 28), 10, mean=(0.1307,), std=(0.3081,), hub_id="ylecun/mnist"),
    Source(
        "cifar100",
        (3, 32, 32),
        100,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        augment=(RandomCrop(4), HorizontalFlip()),
        hub_id="uoft-cs/cifar100",
        image_column="img",
        label_column="fine_label",
    ),
    Source(
        "tiny-imagenet",
        (3, 64, 64),
        200,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augment=(HorizontalFlip(),),
        hub_id="zh-plus/tiny-imagenet",
        test_split="valid",  # the set's own test labels are not public
    ),
    Source(
        "imagenet",
        (3, 224, 224),
        1000,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        hub_id="ILSVRC/imagenet-1k",
        test_split="validation",  # the set's own test labels are not public
        lazy=True,
    ),
)


def find_source(name: str) -> Source:
    """Find a source by short name (`mnist`) or hub id (`ylecun/mnist`)."""
    for source in SOURCES:
        if name in (source.name, source.hub_id):
            return source
    raise unknown("data set", name, (source.name for source in SOURCES))
