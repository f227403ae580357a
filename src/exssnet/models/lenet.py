"""LeNet-300-100: two hidden layers on the flattened image, the network of SplitMNIST. With biases: `mlp`."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from exssnet.errors import InputError


class LeNet(nn.Module):
    """An MLP with hidden layers of 300 and 100 units, both times `width`, for inputs of any shape."""

    def __init__(self, input_shape: Sequence[int], classes: int, width: float = 1, bias: bool = False) -> None:
        super().__init__()
        if not 0 < width < math.inf:
            raise InputError(f"width {width} of LeNet-300-100: give a positive factor, 1 for 300 and 100 units")
        first, second = (max(1, round(units * width)) for units in (300, 100))
        self.hidden = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), first, bias=bias),
            nn.ReLU(),
            nn.Linear(first, second, bias=bias),
            nn.ReLU(),
        )
        self.head = nn.Linear(second, classes, bias=bias)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):  # nothing drawn: a model directory makes its first values again, in any version
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(x))
        return logits


def mlp(input_shape: Sequence[int], classes: int, width: float = 1) -> LeNet:
    """LeNet-300-100 with biases, which start at zero."""
    return LeNet(input_shape, classes, width, bias=True)
