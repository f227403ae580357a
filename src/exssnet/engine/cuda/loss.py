"""Cross-entropy and the counting of right answers on a GPU, a launch each.

Logits of a batch are a few kilobytes: one program holds them, so sums have one order and the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.engine.cuda.kernels import jit, launch

TILE = 4096  # logits held at a time


@jit
def _read(
    logits: tl.tensor, labels: tl.tensor, begin: tl.tensor, rows: tl.tensor, classes: tl.tensor,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Logits of some rows (−∞ beyond the classes, 0 beyond the rows), labels, and which rows there are."""
    row, column = begin + tl.arange(0, ROWS), tl.arange(0, CLASSES)
    there = row < rows
    values = tl.load(
        logits + row[:, None] * classes + column[None, :], mask=there[:, None] & (column < classes)[None, :], other=0.0
    )
    x = tl.where((column < classes)[None, :], values, float("-inf"))
    return x, tl.load(labels + row, mask=there, other=0), there


@jit
def _loss(
    logits: tl.tensor, labels: tl.tensor, loss: tl.tensor, gradient: tl.tensor, rows: tl.tensor, classes: tl.tensor,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
) -> None:  # fmt: skip
    """The mean cross-entropy, and its gradient."""
    column = tl.arange(0, CLASSES)
    total = tl.sum(tl.zeros([CLASSES], tl.float32), 0)
    begin = rows * 0
    while begin < rows:
        x, label, there = _read(logits, labels, begin, rows, classes, ROWS, CLASSES)
        top = tl.max(x, 1)
        e = tl.exp(x - top[:, None])
        all_of_row = tl.sum(e, 1)
        is_label = column[None, :] == label[:, None]
        of_label = tl.sum(tl.where(is_label, x, 0.0), 1)
        total += tl.sum(tl.where(there, tl.log(all_of_row) + top - of_label, 0.0), 0)
        slope = (e / all_of_row[:, None] - tl.where(is_label, 1.0, 0.0)) / rows
        row = begin + tl.arange(0, ROWS)
        inside = there[:, None] & (column < classes)[None, :]
        tl.store(gradient + row[:, None] * classes + column[None, :], slope, mask=inside)
        begin += ROWS
    tl.store(loss, total / rows)


@jit
def _count(
    logits: tl.tensor, labels: tl.tensor, loss: tl.tensor, total: tl.tensor, rows: tl.tensor, classes: tl.tensor,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
) -> None:  # fmt: skip
    """Add the batch's summed loss and its right answers to the totals."""
    right = rows * 0
    begin = rows * 0
    while begin < rows:
        x, label, there = _read(logits, labels, begin, rows, classes, ROWS, CLASSES)
        right += tl.sum(((tl.argmax(x, 1) == label) & there).to(tl.int32), 0)
        begin += ROWS
    tl.store(total, tl.load(total) + tl.load(loss) * rows)
    tl.store(total + 1, tl.load(total + 1) + right)


def fits(logits: Tensor) -> bool:
    """Whether the kernels take such logits."""
    return logits.ndim == 2 and logits.shape[1] <= TILE and len(logits) > 0


def _shape(logits: Tensor) -> tuple[int, int, int, int]:
    rows, classes = logits.shape
    columns = triton.next_power_of_2(classes)
    return rows, classes, min(triton.next_power_of_2(rows), TILE // columns), columns


class CrossEntropy(torch.autograd.Function):
    """The mean over the batch; the gradient is made with it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        loss, gradient = logits.new_empty(()), torch.empty_like(logits, memory_format=torch.contiguous_format)
        launch(_loss, (1,), logits.contiguous(), labels, loss, gradient, *_shape(logits))
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradients[0], None


def count(total: Tensor, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add the batch's summed loss and right answers to the totals."""
    launch(_count, (1,), logits.contiguous(), labels, loss, total, *_shape(logits))
