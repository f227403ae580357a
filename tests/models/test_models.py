"""The paper's networks have its weights and nothing else that trains; the one for tables has biases."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from exssnet import models
from exssnet.errors import InputError

SHAPES = {"lenet-300-100": (1, 28, 28), "mlp": (5,), "resnet18": (3, 32, 32), "resnet50": (3, 64, 64)}
SHAPES |= {"text-cnn": (256, 769), "text-cnn-relu": (256, 769)}
small = pytest.mark.parametrize(("name", "width"), [("lenet-300-100", 0.1), ("resnet18", 4), ("resnet50", 4)])
of_the_paper = pytest.mark.parametrize("name", [name for name in models.names() if name != "mlp"])
every = pytest.mark.parametrize("name", models.names())


def build_meta(name: str, classes: int = 2) -> nn.Module:
    """The full-size network without memory for its weights."""
    with torch.device("meta"):
        return models.build(name, SHAPES[name], classes)


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def resnet50_weights(classes: int) -> int:
    """By the ResNet paper's table: 7×7, then stages of 1×1, 3×3, 1×1 at inner widths 64 to 512."""
    total, inputs = 7 * 7 * 3 * 64, 64
    for inner, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        outputs = 4 * inner
        total += inputs * outputs  # shortcut of the stage's first block
        for _ in range(blocks):
            total += inputs * inner + 9 * inner * inner + inner * outputs
            inputs = outputs
    return total + inputs * classes


def test_lenet_has_the_papers_weights() -> None:
    assert count(build_meta("lenet-300-100", 2)) == 784 * 300 + 300 * 100 + 100 * 2 == 265_400


def test_resnet18_has_the_papers_weights() -> None:
    stages = 4 * 9 * 20**2 + sum(9 * c * c // 2 + 3 * 9 * c * c + c * c // 2 for c in (40, 80, 160))
    assert count(build_meta("resnet18", 20)) == 9 * 3 * 20 + stages + 160 * 20 == 1_093_340


def test_resnet50_has_the_papers_weights() -> None:
    assert count(build_meta("resnet50", 40)) == resnet50_weights(40) == 23_536_832


@of_the_paper
def test_only_linear_and_convolution_weights_train(name: str) -> None:
    network = build_meta(name)
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    assert all(layer.bias is None for layer in layers)
    assert sum(layer.weight.numel() for layer in layers) == count(network)
    assert not any(m.affine for m in network.modules() if isinstance(m, nn.BatchNorm2d))


def test_the_network_for_tables_is_lenet_with_biases_that_start_at_zero() -> None:
    mlp, lenet = models.build("mlp", (5,), 3, 0.1), models.build("lenet-300-100", (5,), 3, 0.1)
    found = dict(mlp.named_parameters())
    biases = [found.pop(name) for name in list(found) if name.endswith("bias")]
    assert [len(bias) for bias in biases] == [30, 10, 3]
    assert not any(bias.any() for bias in biases)
    assert {name: p.shape for name, p in found.items()} == {name: p.shape for name, p in lenet.named_parameters()}


@pytest.mark.parametrize(
    ("shape", "name"),
    [((4,), "mlp"), ((64,), "mlp"), ((20, 3), "mlp"), ((1, 28, 28), "lenet-300-100"), ((1, 64, 64), "resnet18"),
     ((3, 8, 8), "resnet18")],
)  # fmt: skip
def test_the_usual_network_follows_from_the_shape_of_an_input(shape: tuple[int, ...], name: str) -> None:
    assert models.fitting(shape) == name


@every
def test_the_head_is_the_last_layer_and_has_one_output_per_class(name: str) -> None:
    network = build_meta(name, 7)
    assert isinstance(network.head, nn.Linear)
    assert network.head.out_features == 7
    assert list(network.named_parameters())[-1][0] in ("head.weight", "head.bias")


@small
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 45, 33)])
def test_logits_for_every_image_size(name: str, width: float, shape: tuple[int, ...]) -> None:
    network = models.build(name, shape, classes=5, width=width).eval()
    assert network(torch.randn(2, *shape)).shape == (2, 5)


@small
def test_every_weight_receives_a_gradient(name: str, width: float) -> None:
    torch.manual_seed(0)
    network = models.build(name, SHAPES[name], classes=3, width=width)
    network(torch.randn(4, *SHAPES[name])).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())


@pytest.mark.parametrize(("name", "size", "stem", "last"), [("resnet18", 32, 32, 4), ("resnet50", 64, 16, 2)])
def test_image_sizes_after_stem_and_stages(name: str, size: int, stem: int, last: int) -> None:
    network = models.build(name, (3, size, size), classes=2, width=4).eval()
    after_stem = network.stem(torch.zeros(1, 3, size, size))
    assert after_stem.shape[2:] == (stem, stem)
    assert network.stages(after_stem).shape[2:] == (last, last)


@pytest.mark.parametrize(
    ("name", "width", "features"), [("resnet18", 4, 32), ("resnet50", 4, 128), ("lenet-300-100", 0.5, 50)]
)
def test_width_scales_every_layer(name: str, width: float, features: int) -> None:
    network = models.build(name, SHAPES[name], classes=2, width=width)
    assert network.head.in_features == features
    narrow, wide = count(network), count(models.build(name, SHAPES[name], classes=2, width=2 * width))
    assert narrow < wide < 4 * narrow


@pytest.mark.parametrize("width", [0, -1, float("nan"), float("inf")])
@every
def test_an_impossible_width_is_refused(name: str, width: float) -> None:
    with pytest.raises(InputError, match="width"):
        models.build(name, SHAPES[name], classes=2, width=width)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_filters_are_a_whole_number_of_an_image_network(name: str) -> None:
    with pytest.raises(InputError, match=r"width 4\.5"):
        models.build(name, (3, 32, 32), classes=2, width=4.5)
    with pytest.raises(InputError, match="channels, height, width"):
        models.build(name, (784,), classes=2)


@every
def test_impossible_sizes_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="classes"):
        models.build(name, SHAPES[name], classes=0)
    with pytest.raises(InputError, match="shape"):
        models.build(name, (3, 0, 32), classes=2)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(InputError, match="resnet18"):
        models.build("resnet-18", (3, 32, 32), classes=2)


def test_names_and_descriptions_are_read_without_torch() -> None:
    code = "import sys; from exssnet import models; print(models.describe()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in models.names())
    assert list(models.describe()) == models.names() == list(SHAPES)
