import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.networks import Transformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss

from exssnet.core.module.skeleton import Runner
from exssnet.errors import InputError
from exssnet.methods.shared import fisher
from exssnet.methods.shared.fisher import fisher_diagonal
from exssnet.models import build

CLASSES = 4


def one_at_a_time(module, x, y, loss=cross_entropy) -> dict[str, Tensor]:
    """The definition: each example's gradient for itself, squared and summed."""
    total = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for i in range(len(x)):
        one = loss(module(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(one, list(module.parameters()), allow_unused=True)
        for name, gradient in zip(total, gradients, strict=True):
            total[name] += 0 if gradient is None else gradient**2
    return total


def batched(module, x, y, loss=cross_entropy) -> dict[str, Tensor]:
    """From a skeleton that holds no numbers."""
    skeleton = Runner(module, ()).skeleton
    return fisher_diagonal(skeleton, dict(module.named_parameters()), dict(module.named_buffers()), x, y, loss)


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-9, atol=1e-15)


# --- Modules whose layers are done by hand ------------------------------------------------------------------


def mlp(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9, bias=bias), nn.ReLU(), nn.Linear(9, CLASSES, bias=bias))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, groups=2, padding=2, bias=False),
        nn.Tanh(),
        nn.Conv2d(6, 6, (3, 1), groups=6, padding="same", dilation=2),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, CLASSES),
    )


def resnet() -> nn.Module:
    network = build("resnet18", (3, 12, 12), CLASSES, width=4)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):  # as after some training
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 2)
    return network


class OverTokens(nn.Module):
    """Linear layers over the positions of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, 2, 5]
        return self.second(self.first(x).relu()).mean((1, 2))


class SpareHead(nn.Module):
    """A head for each of two tasks; only one is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[1](self.body(x).tanh())


def hooked() -> nn.Module:
    """A hook of the user's changes what a layer gives."""
    module = mlp(True)
    module[0].register_forward_hook(lambda _layer, _args, out: 3 * out)
    return module


BY_HAND = {
    "mlp": (lambda: mlp(True), (6,)),
    "mlp without biases": (lambda: mlp(False), (6,)),
    "a single layer": (lambda: nn.Linear(6, CLASSES), (6,)),
    "cnn": (cnn, (2, 9, 8)),
    "resnet18": (resnet, (3, 12, 12)),
    "over tokens": (OverTokens, (3, 2, 5)),
    "a head that is not used": (SpareHead, (6,)),
    "a hook on a layer": (hooked, (6,)),
}

# --- Modules that are not -----------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()))


class UsedBesideItsLayer(Twice):
    """A weight that the module also uses without calling its layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(linear(self.layer(x).tanh(), self.layer.weight))


class UsedWithoutItsLayer(Twice):
    """A layer that is called for nothing, and whose weight is used elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        return self.head(linear(x, self.layer.weight, self.layer.bias))


class CalledByKeyword(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=self.layer(x).tanh())


class CalledWithoutGradient(Twice):
    """One of the calls is a constant to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layer(x).norm(dim=1, keepdim=True)
        return self.head(self.layer(x) / scale)


class Squashed(nn.Linear):
    """A layer that does something of its own with its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight.tanh(), self.bias)


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.rand(6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.where(x > 0, x, self.slope * x))


class SequenceFirst(OverTokens):
    """The batch is the second dimension; the sequence happens to be as long."""

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5]
        return self.second(self.first(x.transpose(0, 1)).relu()).mean(0)


class FlattenedTokens(OverTokens):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 2)[:, None, None]).view(len(x), -1, CLASSES).mean(1)


class Queries(nn.Module):
    """A layer that sees no example, on as many rows as there are examples."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(rows, 6))
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.layer(self.rows).T @ self.rows)


class OverwrittenView(OverTokens):
    """The output of a layer, a view, is used before and after it is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        sums = hidden.sum((1, 2))
        return self.second(hidden.relu_()).mean((1, 2)) + sums[:, :CLASSES]


class Branching(nn.Module):
    """A branch on a value, which cannot be transformed; some examples use a weight, others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(6), nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [self.left(self.norm(row)) if row[0, 0] > 0 else self.right(self.norm(row)) for row in x.split(1)]
        )


OTHER = {
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, CLASSES)), (6,)),
    "batch norm with affine": (lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)), (6,)),
    "used twice": (Twice, (6,)),
    "tied": (Tied, (6,)),
    "used beside its layer": (UsedBesideItsLayer, (6,)),
    "used without its layer": (UsedWithoutItsLayer, (6,)),
    "called by keyword": (CalledByKeyword, (6,)),
    "called without gradient": (CalledWithoutGradient, (6,)),
    "subclass": (lambda: nn.Sequential(Squashed(6, 5), nn.ReLU(), nn.Linear(5, CLASSES)), (6,)),
    "own parameter": (OwnParameter, (6,)),
    "sequence first": (SequenceFirst, (7, 5)),
    "rows of no example": (lambda: Queries(7), (6,)),
    "flattened tokens": (FlattenedTokens, (3, 2, 5)),
    "overwritten view": (OverwrittenView, (3, 2, 5)),
    "branching": (Branching, (6,)),
}  # fmt: skip


def example(make, shape, rows=7):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().double().eval()
        return module, torch.randn(rows, *shape, dtype=torch.float64), torch.arange(rows) % CLASSES


@pytest.mark.parametrize("case", BY_HAND)
def test_plain_layers_equal_one_example_at_a_time_and_are_done_by_hand(case, monkeypatch):
    monkeypatch.delattr(fisher, "_by_vmap")
    module, x, y = example(*BY_HAND[case])
    assert_same(batched(module, x, y), one_at_a_time(module, x, y))


@pytest.mark.parametrize("case", OTHER)
def test_any_other_module_equals_one_example_at_a_time(case):
    module, x, y = example(*OTHER[case])
    assert_same(batched(module, x, y), one_at_a_time(module, x, y))


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Embedding(20, 5), OverTokens()), lambda: Transformer(CLASSES)]
)
def test_embedded_tokens_equal_one_example_at_a_time(make):
    module, _, y = example(make, ())
    shape = (7, 3, 2) if isinstance(module, nn.Sequential) else (7, 8)
    x = torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(1))
    assert_same(batched(module, x, y), one_at_a_time(module, x, y))


@pytest.mark.parametrize("case", [*BY_HAND, *OTHER])
def test_a_batch_of_one_is_its_squared_gradient(case):
    module, x, y = example(*(BY_HAND | OTHER)[case], rows=1)
    assert_same(batched(module, x, y), one_at_a_time(module, x, y))


@pytest.mark.parametrize("case", ["cnn", "over tokens", "mlp", "layer norm"])
def test_holding_fewer_gradients_at_a_time_changes_nothing(case, monkeypatch):
    module, x, y = example(*(BY_HAND | OTHER)[case])
    expected, sizes, portions = batched(module, x, y), [], fisher._portions

    def watched(size, *tensors):
        found = list(portions(size, *tensors))
        sizes.extend(len(portion[0]) for portion in found)
        return found

    monkeypatch.setattr(fisher, "_portions", watched)
    monkeypatch.setattr(fisher, "HELD", 1)
    monkeypatch.setattr(fisher, "HELD_BY_VMAP", 1)
    monkeypatch.setattr(fisher, "IN_CACHE", 2)
    assert_same(batched(module, x, y), expected)
    assert set(sizes) == ({1, 2} if case in ("cnn", "mlp") else {1})  # 7 as 2, 2, 2 and 1, or one by one


@given(
    seed=st.integers(0, 2**31), rows=st.integers(2, 12), cut=st.integers(1, 11),
    case=st.sampled_from(["mlp", "mlp without biases", "cnn", "over tokens", "layer norm"]),
)  # fmt: skip
def test_it_is_never_negative_and_the_parts_of_a_batch_add_up(seed, rows, cut, case):
    make, shape = (BY_HAND | OTHER)[case]
    module, _, _ = example(make, shape)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *shape, generator=draw, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (rows,), generator=draw)
    cut = min(cut, rows - 1)
    whole, left, right = (batched(module, x[part], y[part]) for part in (slice(None), slice(cut), slice(cut, None)))
    assert all((value >= 0).all() for value in whole.values())
    assert_same(whole, {name: left[name] + right[name] for name in whole})


@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3),
    st.integers(0, 2), st.integers(1, 2), st.sampled_from(["zeros", "reflect", "replicate", "circular"]), st.booleans(),
)  # fmt: skip
def test_every_convolution_equals_one_example_at_a_time(
    groups, ins, outs, kernel, stride, padding, dilation, mode, bias
):
    def make():
        sizes = (groups * ins, groups * outs, kernel, stride, padding, dilation, groups, bias, mode)
        return nn.Sequential(nn.Conv2d(*sizes), nn.Tanh(), nn.Flatten())

    module, x, _ = example(make, (groups * ins, 7, 6), rows=3)
    y = torch.randn_like(module(x))
    assert_same(batched(module, x, y, mse_loss), one_at_a_time(module, x, y, mse_loss))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # it is slower
def test_padding_that_differs_from_side_to_side_equals_one_example_at_a_time():
    module, x, y = example(lambda: nn.Sequential(nn.Conv2d(2, CLASSES, 2, padding="same"), nn.Flatten()), (2, 5, 4))
    assert_same(batched(module, x, y), one_at_a_time(module, x, y))


def test_only_the_given_weights_are_differentiated_also_where_gradients_are_off():
    module, x, y = example(*BY_HAND["cnn"])
    tensors = dict(module.named_parameters())
    names = ["0.bias", "2.weight", "8.weight"]
    fixed = {name: tensor for name, tensor in tensors.items() if name not in names}
    with torch.no_grad():
        found = fisher_diagonal(module, {name: tensors[name] for name in names}, fixed, x, y, cross_entropy)
    expected = one_at_a_time(module, x, y)
    assert_same(found, {name: expected[name] for name in names})
    assert all(parameter.grad is None for parameter in module.parameters())


def test_weights_that_the_loss_does_not_reach_get_zeros():
    module, x, y = example(*BY_HAND["mlp"])
    found = batched(module, x, y, lambda out, _: 0 * x.mean())
    assert not any(value.any() for value in found.values())


def test_a_module_that_autograd_refuses_is_refused():
    class Overwriting(Twice):
        def forward(self, x: Tensor) -> Tensor:
            scaled = 2 * x
            hidden = self.layer(scaled)
            scaled.zero_()
            return self.head(hidden)

    module, x, y = example(Overwriting, (6,))
    with pytest.raises(RuntimeError, match="inplace"):
        batched(module, x, y)


def test_single_precision_stays_single_and_close():
    module, x, y = example(*BY_HAND["resnet18"])
    expected = one_at_a_time(module, x, y)
    found = batched(module.float(), x.float(), y)
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-3, atol=1e-4 * expected[name].max())


def test_a_module_in_training_mode_is_refused():
    module, x, y = example(*BY_HAND["mlp"])
    module[1].train()
    with pytest.raises(InputError, match="training mode"):
        fisher_diagonal(module, dict(module.named_parameters()), {}, x, y, cross_entropy)


def test_no_hook_stays_on_the_module():
    module, x, y = example(*BY_HAND["cnn"])
    fisher_diagonal(module, dict(module.named_parameters()), {}, x, y, cross_entropy)
    with pytest.raises(RuntimeError):
        fisher_diagonal(module, dict(module.named_parameters()), {}, x[:, :1], y, cross_entropy)
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [*BY_HAND, *OTHER])
def test_a_gpu_finds_the_same(case):
    module, x, y = example(*(BY_HAND | OTHER)[case])
    expected = one_at_a_time(module, x, y)
    found = batched(module.cuda(), x.cuda(), y.cuda())
    assert_same({name: value.cpu() for name, value in found.items()}, expected)
