"""ResNets: the 18-layer one for 32×32 images (SplitCIFAR100) and the 50-layer one (SplitTinyImageNet)."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from exssnet.errors import InputError


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image size, up to the stride."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def norm(channels: int) -> nn.BatchNorm2d:
    """Batch normalisation that learns nothing but its running statistics."""
    return nn.BatchNorm2d(channels, affine=False)


class Residual(nn.Module):
    """relu(body(x) + x), x passing through a 1×1 convolution where the body changes its shape."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), norm(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def basic(inputs: int, outputs: int, stride: int) -> Residual:
    """Two 3×3 convolutions."""
    body = nn.Sequential(
        conv(inputs, outputs, 3, stride),
        norm(outputs),
        nn.ReLU(),
        conv(outputs, outputs, 3),
        norm(outputs),
    )
    return Residual(body, inputs, outputs, stride)


def bottleneck(inputs: int, outputs: int, stride: int) -> Residual:
    """1×1 down to a quarter of the outputs, 3×3 (with the stride), 1×1 up again."""
    inner = outputs // 4
    body = nn.Sequential(
        conv(inputs, inner, 1),
        norm(inner),
        nn.ReLU(),
        conv(inner, inner, 3, stride),
        norm(inner),
        nn.ReLU(),
        conv(inner, outputs, 1),
        norm(outputs),
    )
    return Residual(body, inputs, outputs, stride)


class ResNet(nn.Module):
    """A stem, stages of residual blocks (all but the first halve the image and double the channels), head."""

    def __init__(
        self,
        stem: nn.Sequential,
        block: Callable[[int, int, int], Residual],
        depths: Sequence[int],
        width: int,  # channels out of the stem
        channels: int,  # channels out of the first stage
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential()
        inputs = width
        for stage, depth in enumerate(depths):
            outputs = channels * 2**stage
            blocks = [block(inputs, outputs, 1 if stage == 0 else 2)]
            blocks += [block(outputs, outputs, 1) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.stages(self.stem(x))))
        return logits


def resnet18(input_shape: Sequence[int], classes: int, width: float = 20) -> ResNet:
    """ResNet-18 with a 3×3 stem that keeps the image size."""
    filters = _filters("ResNet-18", width)
    stem = nn.Sequential(conv(_channels("ResNet-18", input_shape), filters, 3), norm(filters), nn.ReLU())
    return ResNet(stem, basic, [2, 2, 2, 2], filters, filters, classes)


def resnet50(input_shape: Sequence[int], classes: int, width: float = 64) -> ResNet:
    """ResNet-50 with the ImageNet stem, 7×7/2 and a 3×3/2 max-pool, at every image size."""
    filters = _filters("ResNet-50", width)
    stem = nn.Sequential(
        conv(_channels("ResNet-50", input_shape), filters, 7, stride=2),
        norm(filters),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    return ResNet(stem, bottleneck, [3, 4, 6, 3], filters, 4 * filters, classes)


def _filters(network: str, width: float) -> int:
    if width < 1 or not float(width).is_integer():
        raise InputError(f"width {width} of {network}: give the filters of its stem, a whole number from 1")
    return int(width)


def _channels(network: str, input_shape: Sequence[int]) -> int:
    if len(input_shape) != 3:
        raise InputError(f"input shape {tuple(input_shape)} of {network}: give (channels, height, width)")
    return input_shape[0]
