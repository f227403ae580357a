"""Adam for long vectors on a GPU.

torch's fused Adam gives a block 65,536 numbers, so a network's one vector of a million scores keeps 17 blocks busy on a
chip that has room for hundreds. This kernel cuts the vector finer. State and formula are those of `torch.optim.AdamW`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from exssnet.engine.cuda.kernels import jit, launch

BLOCK = 1024
LONG = 8192  # numbers from which a vector gets a launch of its own; the others share torch's


@jit
def _adam(
    values: tl.tensor, gradients: tl.tensor, means: tl.tensor, squares: tl.tensor, steps: tl.tensor, rate: tl.tensor,
    new1: tl.tensor, new2: tl.tensor, log1: tl.tensor, log2: tl.tensor, epsilon: tl.tensor, decay: tl.tensor,
    size: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One step; `new` is 1 − β and `log` the logarithm of β, taken on the host in double precision."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gradients + at, mask=inside, other=0.0)
    m = tl.load(means + at, mask=inside, other=0.0)
    v = tl.load(squares + at, mask=inside, other=0.0)
    m += new1 * (g - m)
    v += new2 * (g * g - v)
    # 1 − β^t loses its digits in single precision while t is small
    t = tl.load(steps).to(tl.float64)
    unbias1 = 1 - tl.exp(t * log1)
    unbias2 = 1 - tl.exp(t * log2)
    lr = tl.load(rate)
    size_of_step = lr / unbias1.to(tl.float32)
    away = m / (tl.sqrt(v) / tl.sqrt(unbias2).to(tl.float32) + epsilon)
    p = tl.load(values + at, mask=inside, other=0.0)
    p -= lr * decay * p
    tl.store(values + at, p - size_of_step * away, mask=inside)
    tl.store(means + at, m, mask=inside)
    tl.store(squares + at, v, mask=inside)


class LongAdam(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True, capturable=True)` for single precision on a GPU, faster on long vectors.

    Without decay it is Adam.
    """

    def __init__(self, parameters: list[Tensor], lr: Tensor, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, lr, weight_decay=weight_decay, fused=True, capturable=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        long = [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.numel() >= LONG
        ]
        for _, parameter, _ in long:
            parameter.grad = None  # out of sight for torch's step
        super().step()
        for group, parameter, gradient in long:
            parameter.grad = gradient
            self._update(parameter, gradient, group)

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        launch(
            _adam, (triton.cdiv(p.numel(), BLOCK),), p, gradient.contiguous(), state["exp_avg"], state["exp_avg_sq"],
            state["step"], group["lr"], 1 - beta1, 1 - beta2, math.log(beta1), math.log(beta2), group["eps"],
            group["weight_decay"], p.numel(), BLOCK=BLOCK,
        )  # fmt: skip
