import pytest
import torch
from tests.core.networks import Transformer, mlp
from torch import nn

from exssnet.core.partition import partition
from exssnet.errors import InputError

LAYERS = [
    (nn.Linear(6, 4), 6),
    (nn.Conv1d(6, 4, 3), 18),
    (nn.Conv2d(6, 4, 3, groups=2), 27),
    (nn.Conv3d(2, 4, 3), 54),
    (nn.ConvTranspose1d(6, 4, 3), 18),
    (nn.ConvTranspose2d(6, 4, 3, groups=2), 27),
    (nn.ConvTranspose3d(2, 4, 3), 54),
]


@pytest.mark.parametrize(("layer", "fan_in"), LAYERS, ids=lambda value: getattr(value, "_get_name", lambda: value)())
def test_every_linear_and_convolution_weight_is_masked_with_its_fan_in(layer, fan_in):
    found = partition(nn.Sequential(layer))
    assert [(masked.name, masked.shape, masked.fan_in) for masked in found.masked.layers] == [
        ("0.weight", tuple(layer.weight.shape), fan_in)
    ]
    assert found.frozen == ("0.bias",)


@pytest.mark.parametrize("private", [(), ("norm",), ("bias",), ("norm", "bias", "position")])
@pytest.mark.parametrize("head", ["shared", "task"])
def test_every_parameter_is_exactly_one_of_masked_private_and_frozen(private, head):
    module = Transformer()
    found = partition(module, private, head)
    masked = [layer.name for layer in found.masked.layers]
    assert sorted([*masked, *found.private, *found.frozen]) == sorted(n for n, _ in module.named_parameters())
    assert found.masked.size == sum(module.get_parameter(name).numel() for name in masked)
    assert "encoder.layers.0.self_attn.in_proj_weight" in masked
    assert "embedding.weight" in found.frozen
    assert ("classify.weight" in found.private) == (head == "task")
    assert ("position" in found.private) == ("position" in private)
    assert ("encoder.layers.1.norm2.weight" in found.private) == ("norm" in private)
    assert ("encoder.layers.1.linear1.bias" in found.private) == ("bias" in private)


def test_a_weight_tied_to_an_embedding_is_frozen():
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10))
    module[2].weight = module[0].weight
    found = partition(module)
    assert [layer.name for layer in found.masked.layers] == ["1.weight"]
    assert "0.weight" in found.frozen


def test_the_head_is_the_last_linear_layer_unless_named():
    assert partition(mlp()).head == "5"
    assert partition(mlp(), head_layer="2").head == "2"
    with pytest.raises(InputError, match="head_layer 'nose' is not a Linear or convolution layer: choose from 0, 2, 5"):
        partition(mlp(), head_layer="nose")


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.Sequential(nn.ReLU(), nn.Embedding(3, 2)), {}, "nothing to mask"),
        (nn.Sequential(nn.Linear(3, 2)), {"head": "task"}, "nothing to mask"),
        (nn.Sequential(nn.LazyLinear(3)), {}, "lazy layers"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).double()), {}, "convert the module to float32 or float64"),
        (mlp().bfloat16(), {}, "convert the module to float32 or float64"),
        (mlp(), {"head": "both"}, "head is 'both': choose one of shared, task"),
    ],
)
def test_a_module_that_cannot_be_masked_is_refused(module, options, message):
    with pytest.raises(InputError, match=message):
        partition(module, **options)


def test_the_meta_skeleton_is_found_alike():
    assert partition(mlp().to(torch.device("meta"))).masked == partition(mlp()).masked
