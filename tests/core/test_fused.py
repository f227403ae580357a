"""Units are found in a module's graph where they are, and nowhere else."""

import pytest
import torch
from torch import nn

from exssnet.core.fused import fuse, unit
from exssnet.models import build


def units(module):
    graph = fuse(module, widest=64)
    assert graph is not None
    return [node for node in graph.graph.nodes if node.target is unit]


def block(*more):
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False), *more)


def test_a_resnet_is_units_from_end_to_end():
    found = units(build("resnet18", (3, 12, 12), 4, width=5))
    assert len(found) == 20
    assert sum(node.args[2] is not None for node in found) == 8  # one sum in each block
    assert sum(not node.args[-1].relu for node in found) == 3  # the body's end where the shortcut takes the sum


def test_a_unit_ends_where_its_result_is_asked_for():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = block()

        def forward(self, x):
            out = self.body(x)
            return out.relu() + out

    (found,) = units(Twice())
    assert not found.args[-1].relu


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = block()

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else x


LEFT_ALONE = {
    "affine": nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)),
    "a bias": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)),
    "wide": nn.Sequential(nn.Conv2d(3, 65, 3, bias=False), nn.BatchNorm2d(65, affine=False)),
    "no statistics": nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False, track_running_stats=False)
    ),
    "the mean of all": nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False, momentum=None)),
    "another norm": nn.Sequential(*block(), nn.Flatten(), nn.BatchNorm1d(400)),
    "no norm": nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU()),
    "a choice": Choosing(),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_cannot_be_fused_is_left_to_the_compiler(kind):
    assert fuse(LEFT_ALONE[kind], widest=64) is None


def test_a_layer_used_twice_is_left_to_the_compiler():
    norm, first, second = nn.BatchNorm2d(3, affine=False), *(nn.Conv2d(3, 3, 1, bias=False) for _ in range(2))
    assert fuse(nn.Sequential(first, norm, second, norm), widest=64) is None


def test_units_give_the_modules_own_numbers():
    torch.manual_seed(0)
    module = build("resnet18", (3, 12, 12), 4, width=5).train()
    fused = fuse(module, widest=64)
    x = torch.randn(6, 3, 12, 12)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    wanted = module(x)
    moved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.load_state_dict(before, strict=False)
    assert torch.allclose(fused(x), wanted, atol=1e-5)
    for name, buffer in fused.named_buffers():
        assert torch.allclose(buffer, moved[name], atol=1e-6), name
