"""Modules in wrappers are unwrapped; layers whose weight is computed are refused with what to do."""

import threading

import pytest
import torch
from tests.core.networks import examples
from torch import nn
from torch.nn.utils import parametrizations, prune

from exssnet import InputError, Model
from exssnet.core.network import MaskedNetwork
from exssnet.methods.shared.flat_network import FlatNetwork

X, Y = examples(0)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))


def nested(wrap) -> nn.Module:
    module = plain()
    module[0] = wrap(module[0])
    return module


def deep(wrap) -> nn.Module:
    return nn.Sequential(nn.Sequential(wrap(plain())), nn.Identity())


def in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


WRAPPED = {
    "compiled": lambda: torch.compile(plain()),
    "compiled in place": lambda: in_place(plain()),
    "parallel": lambda: nn.DataParallel(plain()),
    "compiled parallel": lambda: torch.compile(nn.DataParallel(plain())),
    "a compiled layer": lambda: nested(torch.compile),
    "a parallel layer": lambda: nested(nn.DataParallel),
}


def learned(module: nn.Module) -> Model:
    model = Model(module, density=0.5, init="keep", private=("norm", "bias"))
    model.learn("a", (X, Y), epochs=(2, 2))
    model.learn("b", (X, 1 - Y), epochs=(2, 2))
    return model


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_module_learns_what_the_plain_one_learns_bit_for_bit(kind):
    module = WRAPPED[kind]()
    parts = list(module.named_modules())
    model, wanted = learned(module), learned(plain())
    assert [(name, id(part)) for name, part in module.named_modules()] == [(n, id(p)) for n, p in parts]
    assert [layer.name for layer in model.network.layout.layers] == ["0.weight", "3.weight"]
    assert torch.equal(model.network.weights, wanted.network.weights)
    for task in ("a", "b"):
        assert torch.equal(model.logits(X, task), wanted.logits(X, task))
        assert type(model.bake(task)) is nn.Sequential


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrappers_are_found_at_any_depth_and_tied_layers_stay_tied(wrap):
    network = MaskedNetwork(deep(wrap), 0.5)
    assert [layer.name for layer in network.layout.layers] == ["0.0.0.weight", "0.0.3.weight"]
    assert FlatNetwork(deep(wrap)).layout.layers[0].name == "0.0.0.weight"
    one = nn.Linear(12, 12)
    tied = nn.Sequential(wrap(one), nn.ReLU(), wrap(one), nn.Linear(12, 2))
    assert [layer.name for layer in MaskedNetwork(tied, 0.5).layout.layers] == ["0.weight", "3.weight"]


def with_hook(computed) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Sequential(computed(nn.Linear(16, 20)), nn.ReLU()), nn.Linear(20, 2))


COMPUTED = {
    "old weight norm": (nn.utils.weight_norm, r"torch\.nn\.utils\.remove_weight_norm\(layer\)"),
    "old spectral norm": (nn.utils.spectral_norm, r"torch\.nn\.utils\.remove_spectral_norm\(layer\)"),
    "pruned": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5), r"torch\.nn\.utils\.prune\.remove\(layer, 'weight'\)"
    ),
    "weight norm": (parametrizations.weight_norm, r"remove_parametrizations\(layer, 'weight'\)"),
    "spectral norm": (parametrizations.spectral_norm, r"remove_parametrizations\(layer, 'weight'\)"),
    "orthogonal": (parametrizations.orthogonal, r"remove_parametrizations\(layer, 'weight'\)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_layer_whose_weight_is_computed_is_refused_by_name(kind):
    computed, advice = COMPUTED[kind]
    with pytest.raises(InputError, match=rf"^layer '1\.0' computes its weight .*: call .*{advice} first$"):
        Model(with_hook(computed))
    with pytest.raises(InputError, match=r"^layer '1\.0' computes its weight"):
        FlatNetwork(with_hook(computed))


UNDO = {
    "old weight norm": lambda layer: nn.utils.remove_weight_norm(layer),
    "old spectral norm": lambda layer: nn.utils.remove_spectral_norm(layer),
    "pruned": lambda layer: prune.remove(layer, "weight"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_what_is_advised_makes_the_layer_one_that_is_masked(kind):
    module = with_hook(COMPUTED[kind][0])
    if kind in UNDO:
        UNDO[kind](module[1][0])
    else:
        nn.utils.parametrize.remove_parametrizations(module[1][0], "weight")
    assert [layer.name for layer in Model(module).network.layout.layers] == ["0.weight", "1.0.weight", "2.weight"]


def test_computed_weights_in_a_part_that_the_user_froze_are_left_as_they_are():
    torch.manual_seed(0)
    encoder = nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 16)), nn.ReLU()).requires_grad_(False)
    model = Model(nn.Sequential(encoder, nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 2)), density=0.5)
    model.learn("a", (X, Y), epochs=(4, 4))
    assert [layer.name for layer in model.network.layout.layers] == ["1.weight", "3.weight"]
    with torch.no_grad():
        assert torch.equal(model.bake("a")(X), model.logits(X, "a"))


def test_a_module_that_cannot_be_copied_is_refused_in_one_line():
    module = plain()
    module.lock = threading.Lock()
    with pytest.raises(InputError, match=r"^the module cannot be copied \(.*lock.*\): keep locks"):
        Model(module)
