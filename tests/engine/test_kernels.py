"""Our kernels against the reference and torch: on a GPU, or where there is none in Triton's interpreter."""

import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.parts import missing, need
from torch import nn

from exssnet.core import reference
from exssnet.core.layout import Layer, Layout
from exssnet.data import HorizontalFlip, Normalize, Pipeline, RandomCrop
from exssnet.data.fused import FusedPipeline, fused

need("triton", "the kernels' own tests need Triton: pip install triton")

import triton  # noqa: E402

from exssnet.engine.cuda import convolution_kernels as convolutions  # noqa: E402
from exssnet.engine.cuda import selection as of_cuda  # noqa: E402
from exssnet.engine.cuda.adam import LONG, LongAdam  # noqa: E402
from exssnet.engine.cuda.images import Images  # noqa: E402
from exssnet.engine.cuda.learned import LearnedValues  # noqa: E402
from exssnet.engine.cuda.loss import CrossEntropy, count  # noqa: E402
from exssnet.engine.cuda.selection import CudaSelection  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("default")  # numpy's, of NaN and overflow in the interpreter


def layout_of(sizes):
    layers, start = [], 0
    for number, size in enumerate(sizes):
        layers.append(Layer(str(number), (size,), 1, start))
        start += size
    return Layout(tuple(layers))


on_a_gpu = pytest.mark.skipif(not GPU, reason="the interpreter has no bfloat16 of its own: needs a CUDA device")
every_type = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_a_gpu)]
)


@pytest.mark.parametrize("levels", [0, 1, 3, 1000])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9, 1.0])
def test_selection_equals_the_reference_also_with_ties(levels, density):
    sizes = [540, 3600, 230_400, 2048, 4097, 1000, 100_003] if GPU else [540, 3600, 2048, 4097]
    layout = layout_of(sizes)
    keep = tuple(reference.keep(size, density) for size in sizes)
    places = torch.randperm(layout.size, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    selection = CudaSelection(layout, keep, places, layout.size)
    for seed in range(3):  # the counters must be clean again after each selection
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randn(layout.size, generator=draw)
        if levels:
            scores = torch.randint(-levels, levels + 1, (layout.size,), generator=draw) / levels
        weights = torch.randn(layout.size, generator=draw)
        assert_selected(selection, layout, scores, weights, density, draw)
    if density == 1:
        assert (selection.misses == 1).all()  # whatever the scores are


def assert_selected(selection, layout, scores, weights, density, draw, dtype=torch.float32):
    """The weights under the reference's mask are at their places, and gradients are the reference's."""
    places = selection.positions.long()
    mask = torch.cat([reference.mask(piece, density) for piece in layout.slices(scores)])
    wanted = torch.zeros(selection.size, dtype=dtype)
    wanted[places.cpu()] = torch.where(mask, weights, torch.zeros(())).to(dtype)
    variable = scores.clone().to(DEVICE).requires_grad_()
    found = selection.masked_weights(variable, weights.to(DEVICE), dtype)
    assert torch.equal(found.cpu(), wanted)
    inflow = torch.randn(selection.size, generator=draw).to(dtype)
    found.backward(inflow.to(DEVICE))
    expected = reference.score_gradient(scores, weights, inflow[places.cpu()].float())
    assert torch.allclose(variable.grad.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)


@every_type
@pytest.mark.parametrize("value", [None, 0.0, torch.inf])
def test_selection_from_small_layers_with_room_between_them_in_every_type(value, dtype):
    layout, draw = layout_of([1, 2, 3, 70, 5, 1100]), torch.Generator().manual_seed(0)
    places = torch.randperm(2 * layout.size, generator=draw)[: layout.size].int().to(DEVICE)
    keep = tuple(reference.keep(layer.size, 0.5) for layer in layout.layers)
    selection = CudaSelection(layout, keep, places, 2 * layout.size)
    scores, weights = torch.randn(layout.size, generator=draw), torch.randn(layout.size, generator=draw)
    for _ in range(4):
        scores += 0.001 * torch.randn(layout.size, generator=draw)
        if value is not None:
            scores[torch.rand(layout.size, generator=draw) < 0.6] = value
        assert_selected(selection, layout, scores, weights, 0.5, draw, dtype)


def test_of_equal_scores_the_first_are_chosen_wherever_they_are_looked_for(monkeypatch):
    monkeypatch.setattr(of_cuda, "LONG", 256)
    layout, draw = layout_of([3000]), torch.Generator().manual_seed(0)
    places = torch.arange(3000, dtype=torch.int32, device=DEVICE)
    selection = CudaSelection(layout, (1500,), places, 3000)
    for _ in range(3):  # too many for the list
        scores = torch.randint(1, 3, (3000,), generator=draw).float()
        assert_selected(selection, layout, scores, torch.randn(3000, generator=draw), 0.5, draw)
    assert selection.misses.item() == 3


@pytest.mark.parametrize("listed", [1023, 1024, 1025])
def test_a_list_may_be_full_and_no_longer(listed):
    layout, draw = layout_of([4000]), torch.Generator().manual_seed(0)
    selection = CudaSelection(layout, (2000,), torch.arange(4000, dtype=torch.int32, device=DEVICE), 4000)
    scores = torch.cat([torch.linspace(0.999, 1.001, listed), torch.rand((4000 - listed) // 2, generator=draw) * 0.5])
    scores = torch.cat([scores, 2 + torch.rand(4000 - len(scores), generator=draw)])
    scores = scores[torch.randperm(4000, generator=draw)]
    selection._bands.copy_(torch.tensor([0.9, 1.1]).view(torch.int32))
    assert_selected(selection, layout, scores, torch.randn(4000, generator=draw), 0.5, draw)
    assert selection.misses.item() == (listed > 1024)


def test_a_threshold_that_moves_steadily_is_followed():
    layout, draw = layout_of([60_000]), torch.Generator().manual_seed(0)
    selection = CudaSelection(layout, (6000,), torch.arange(60_000, dtype=torch.int32, device=DEVICE), 60_000)
    scores, weights = torch.rand(60_000, generator=draw) - 0.5, torch.randn(60_000, generator=draw)
    for step in range(20):
        assert_selected(selection, layout, scores * 1.02**step, weights, 0.1, draw)
    assert selection.misses.item() < 5


@pytest.mark.parametrize("kind", ["scores", "values"])
def test_a_gradient_of_the_gradient_is_refused(kind):
    places = torch.arange(100, dtype=torch.int32, device=DEVICE)
    learned = torch.randn(100, device=DEVICE).requires_grad_()
    if kind == "scores":
        selection = CudaSelection(layout_of([100]), (10,), places, 100)
        whole = selection.masked_weights(learned, torch.ones(100, device=DEVICE), torch.float32)
    else:
        whole = LearnedValues(torch.zeros(100, device=DEVICE), places).vector(learned)
    (gradient,) = torch.autograd.grad(whole.square().sum(), learned, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("wide", [False, True])
def test_selection_follows_scores_that_move_step_by_step(wide, monkeypatch):
    """Most steps are known from the last threshold; ties and jumps between them must not confuse it."""
    if wide:  # so that lists are long
        monkeypatch.setattr(of_cuda, "FIRST", 0.2)
        monkeypatch.setattr(of_cuda, "SHARE", 2)
    layout = layout_of([540, 230_400, 30_000] if GPU else [540, 9000, 3000])
    keep = tuple(reference.keep(layer.size, 0.1) for layer in layout.layers)
    places = torch.arange(layout.size, dtype=torch.int32, device=DEVICE)
    selection = CudaSelection(layout, keep, places, layout.size)
    draw, longest = torch.Generator().manual_seed(0), 0
    scores, weights, misses = torch.rand(layout.size, generator=draw) - 0.5, torch.ones(layout.size), []
    for step in range(14):
        scores += 0.001 * torch.randn(layout.size, generator=draw)
        if step == 8:
            scores *= 3  # out of every band
        if step >= 10:
            scores = (100 * scores).round() / 100  # many equals
        mask = torch.cat([reference.mask(piece, 0.1) for piece in layout.slices(scores)])
        low, high = selection._bands[2:4].view(torch.float32).tolist()
        near = (scores.abs() > low) & (scores.abs() <= high)
        longest = max(longest, int(layout.slices(near)[1].count_nonzero()))
        found = selection.masked_weights(scores.to(DEVICE), weights.to(DEVICE), torch.float32)
        assert torch.equal(found.bool().cpu(), mask)
        misses.append(selection.misses.tolist())
    assert misses[0] == [1, 1, 1]  # nothing is known yet
    assert misses[7] == misses[3]
    assert [after - before for before, after in zip(misses[7], misses[8], strict=True)] == [1, 1, 1]
    assert misses[13] == misses[12]  # equals are in the list
    assert not wide or longest > of_cuda.FEW.value


@every_type
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_learned_values_are_put_in_their_places_and_get_their_gradients(count, dtype):
    draw = torch.Generator().manual_seed(0)
    fixed = torch.randn(10_000, generator=draw).to(DEVICE, dtype)
    places = torch.randperm(10_000, generator=draw)[:count].int().to(DEVICE)
    weights = LearnedValues(fixed.clone(), places)
    for step in range(2):
        values = torch.randn(count, generator=draw).to(DEVICE).requires_grad_()
        found = weights.vector(values)
        wanted = fixed.index_put((places.long(),), values.detach().to(dtype))
        inflow = torch.randn(10_000, generator=draw).to(DEVICE, dtype)
        assert torch.equal(found, wanted), step
        found.backward(inflow)
        assert torch.equal(values.grad, inflow[places.long()].float())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 7, 5)])
def test_a_batch_in_one_launch_equals_the_plain_transforms_bit_for_bit(shape):
    images = torch.randint(0, 256, (50, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    scale = Normalize.channels(1 / 255, (0.5, 0.4, 0.3)[: shape[0]], (0.2, 0.3, 0.25)[: shape[0]]).to(DEVICE)
    rows = torch.randint(0, 50, (13,), device=DEVICE)
    for steps in [(scale,), (HorizontalFlip(), scale), (RandomCrop(4), HorizontalFlip(), scale)]:
        fast, plain = fused(Images(images), images, Pipeline(steps)), Pipeline(steps)
        assert isinstance(fast, FusedPipeline)
        assert torch.equal(fast(rows, None), plain(images[rows], None))
        one, two = (torch.Generator(DEVICE).manual_seed(5) for _ in range(2))
        assert torch.equal(fast(rows, one), plain(images[rows], two))
    assert fused(Images(images), images, Pipeline((RandomCrop(4), scale))) is None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "classes"), [(64, 20), (1, 2), (300, 200), (5, 1000), (16, 4096)])
def test_the_loss_and_its_count_equal_torchs(rows, classes, masked):
    draw = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(rows, classes, generator=draw)).to(DEVICE)
    labels = torch.randint(0, classes, (rows,), generator=draw).to(DEVICE)
    if masked:  # outputs that an example is not trained on
        others = torch.rand(rows, classes, generator=draw).to(DEVICE) < 0.5
        logits = logits.masked_fill(others & ~nn.functional.one_hot(labels, classes).bool(), -torch.inf)
    logits.requires_grad_()
    loss, total = CrossEntropy.apply(logits, labels), torch.tensor([1.0, 2.0], device=DEVICE)
    (2 * loss).backward()
    found, logits.grad = logits.grad, None
    expected = nn.functional.cross_entropy(logits, labels)
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-7)
    count(total, loss.detach(), logits.detach(), labels)
    right = int((logits.argmax(1) == labels).sum())
    assert total[1] == 2 + right
    assert float(total[0]) == pytest.approx(1 + expected.item() * rows, rel=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_for_long_vectors_equals_torchs(decay):
    sizes, draw = (LONG, 3 * LONG + 7, *([5] if GPU else [])), torch.Generator().manual_seed(0)  # torch does short ones
    start = [torch.randn(size, generator=draw).to(DEVICE) for size in sizes]
    one, two = ([piece.clone().requires_grad_() for piece in start] for _ in range(2))
    rate = torch.tensor(0.01, device=DEVICE)
    ours = LongAdam(one, rate, weight_decay=decay)
    theirs = torch.optim.AdamW(two, rate.clone(), weight_decay=decay, fused=True, capturable=GPU)
    for step in range(30):
        for p, q in zip(one, two, strict=True):
            p.grad = (10 ** (-step / 5) * torch.randn(len(p), generator=draw)).to(DEVICE)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    for p, q in zip(one, two, strict=True):
        assert ours.state[p].keys() == theirs.state[q].keys()
    assert ours.state[one[0]]["step"] == 30


@pytest.mark.parametrize(
    ("inputs", "outputs", "height", "width", "kernel", "stride", "padding"),
    [(3, 20, 32, 32, 3, 1, 1), (20, 20, 32, 32, 3, 1, 1), (20, 40, 32, 32, 3, 2, 1), (20, 40, 33, 33, 1, 2, 0),
     (80, 160, 8, 8, 3, 2, 1), (160, 160, 4, 4, 3, 1, 1), (5, 7, 9, 8, 5, 1, 0), (5, 7, 9, 8, 5, 3, 2),
     (3, 8, 15, 17, 7, 2, 3), (4, 4, 7, 7, 1, 3, 0), (6, 4, 7, 9, 2, 3, 1)],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.005), (torch.float32, 2e-6)])
def test_convolutions_equal_torchs(inputs, outputs, height, width, kernel, stride, padding, dtype, tolerance):
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("the interpreter has no bfloat16 of its own: needs a CUDA device")
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape):
        values = torch.randn(shape, generator=draw).to(DEVICE, dtype)
        return values.contiguous(memory_format=torch.channels_last)

    images = 7 if GPU else 2
    x, weight = tensor(images, inputs, height, width), tensor(outputs, inputs, kernel, kernel)
    exact = [values.double().requires_grad_() for values in (x, weight)]
    expected = nn.functional.conv2d(*exact, stride=stride, padding=padding)
    inflow = tensor(*expected.shape)
    expected.backward(inflow.double())
    found = [
        convolutions.forward(x, weight, stride, padding),
        convolutions.input_gradient(inflow, weight, height, width, stride, padding),
        convolutions.weight_gradient(inflow, x, kernel, stride, padding),
    ]
    for ours, wanted in zip(found, (expected, exact[0].grad, exact[1].grad), strict=True):
        assert ours.is_contiguous(memory_format=torch.channels_last)
        assert (ours.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert torch.equal(convolutions.forward(x, weight, stride, padding), found[0])


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "a_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_a_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    """C modules of one name, as Triton makes them; each one's `launch` says its number."""
    include, files = sysconfig.get_paths()["include"], []
    if shutil.which("gcc") is None or not Path(include, "Python.h").exists():
        missing("needs a C compiler and Python's headers: install gcc and python3-dev")
    for number in range(4):
        folder = tmp_path_factory.mktemp("launcher")
        (folder / "a.c").write_text(LAUNCHER.replace("NUMBER", str(number)))
        files.append(str(folder / "a_launcher.so"))
        subprocess.run(["gcc", "-shared", "-fPIC", f"-I{include}", folder / "a.c", "-o", files[-1]], check=True)
    return files


def mixed_up(load, files):
    """How often threads that load modules get another one's `launch`."""
    numbers = [number % len(files) for number in range(4000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: load("a_launcher", files[number]).launch(), numbers))
    finally:
        sys.setswitchinterval(before)
    return sum(one != two for one, two in zip(found, numbers, strict=True))


def test_launchers_of_one_name_are_loaded_apart_in_several_threads(launchers):
    load = triton.runtime.build._load_module_from_path
    assert mixed_up(load.__wrapped__, launchers) > 0  # else there would be nothing to do
    assert mixed_up(load, launchers) == 0
