"""Every benchmark of the list runs from its recipe to its record, as a miniature."""

from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from exssnet.errors import InputError
from exssnet.experiments.config import resolve
from exssnet.experiments.recipes import recipes
from exssnet.experiments.run import run
from exssnet.methods import general, methods

QUICK = {"mask_epochs": 1, "weight_epochs": 1}


def fitting(benchmark):
    """The methods that can run on it: those that keep examples need data in memory."""
    return [name for name, kind in general().items() if benchmark != "split-imagenet" or not kind.remembers]


@pytest.mark.parametrize("benchmark", recipes())
def test_a_recipe_resolves_for_every_method_and_names_only_known_settings(benchmark):
    for name in fitting(benchmark):
        config = resolve(benchmark, name, 3)
        assert config.class_order_seed == (3 if config.stream == "split" else 0)
        assert config.settings.get("density", 0.1) == 0.1
        assert recipes()[benchmark]["methods"].get(name, {}).items() <= (asdict(config) | config.settings).items()


@pytest.mark.parametrize("benchmark", recipes())
def test_methods_of_a_table_train_the_same_number_of_epochs(benchmark):
    kinds = {name: methods()[name] for name in fitting(benchmark)}
    planned = {m.settings_type(**resolve(benchmark, n, 0).settings).epochs_per_task for n, m in kinds.items()}
    assert len(planned) == 1


def test_a_method_that_keeps_examples_is_refused_where_they_are_read_from_disk():
    with pytest.raises(InputError, match="er cannot run on split-imagenet"):
        resolve("split-imagenet", "er", 0)


@pytest.mark.parametrize("benchmark", ["split-mnist", "permuted-mnist", "rotated-mnist"])
def test_mnist_benchmarks_learn_well_above_chance(mirror, tmp_path, benchmark):
    config = resolve(benchmark, "exssnet+kkt", 0, tasks=3, samples_per_class=200, lr=0.01, **QUICK)
    record = run(config, tmp_path)
    assert record["miniature"]
    assert record["average_accuracy"] > (90 if benchmark == "split-mnist" else 60)
    assert record["forgetting"] == 0
    assert record["zero_forgetting"]["verified"]


def test_split_cifar100_runs_on_its_network(mirror, tmp_path):
    config = resolve("split-cifar100", "exssnet+kkt", 0, samples_per_class=20, width=4, tasks=2, **QUICK)
    record = run(config, tmp_path)
    assert [len(group) for group in record["class_order"]] == [50, 50]
    assert record["average_accuracy"] > 2
    assert record["zero_forgetting"]["verified"]
    assert record["storage"]["private_bits"] > 0  # norm statistics are counted


def image(seed, size):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def test_split_imagenet_runs_from_an_image_folder(tmp_path):
    for part, count in (("train", 4), ("val", 2)):
        for label in range(4):
            folder = tmp_path / "images" / part / f"n{label:08}"
            folder.mkdir(parents=True)
            for number in range(count):
                image(10 * label + number, (40, 50)).save(folder / f"{number}.jpg")
    config = resolve(
        "split-imagenet", "exssnet+kkt", 0, images=str(tmp_path / "images"), tasks=2, width=4, batch_size=4, **QUICK
    )
    record = run(config, tmp_path / "runs")
    assert record["class_order"] == [[0, 1], [2, 3]]
    assert record["zero_forgetting"]["verified"]


def test_split_tiny_imagenet_runs_from_the_hubs_layout(tmp_path, monkeypatch, write_parquet):
    names = [f"n{label}" for label in range(200)]
    pictures = [np.asarray(image(row, (64, 64))) for row in range(400)]
    for split in ("train", "valid"):
        file = tmp_path / f"mirror/zh-plus/tiny-imagenet/data/{split}-00000-of-00001.parquet"
        write_parquet(file, pictures, [row % 200 for row in range(400)], names)
    monkeypatch.setenv("EXSSNET_DATA", str(tmp_path / "mirror"))
    config = resolve("split-tiny-imagenet", "supsup", 0, width=4, mask_epochs=1)
    record = run(config, tmp_path / "runs")
    assert [len(group) for group in record["class_order"]] == [40] * 5
