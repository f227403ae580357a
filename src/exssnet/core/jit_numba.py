"""What the kernels for a CPU share: numba's compiler, code in vectors of 64 numbers, and memory that stays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

WORD = 64  # bits, and numbers in a vector
ONE = np.uint64(1)

Numbers = NDArray[Any]
Shapes = Sequence[tuple[int, ...]]
inserted: Callable[[Callable[..., Any]], Any] = intrinsic  # code that is written for the compiler
carray: Callable[..., Any] = numba.carray  # type: ignore[attr-defined]  # what is at a pointer


def jit(function: Callable[..., Any]) -> Any:
    """Compiled when it is first called, and kept for other processes."""
    try:
        return numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder where what was compiled could be kept
        return numba.njit(error_model="numpy")(function)


def place_of_vector(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where the 64 numbers of an array from a place on are; they may begin anywhere."""
    data = context.make_array(kind)(context, builder, array).data
    floats = ir.VectorType(context.get_value_type(kind.dtype), WORD)
    return builder.bitcast(builder.gep(data, [at]), floats.as_pointer())


def load_vector(builder: Any, place: Any, kind: Any) -> Any:
    """The 64 numbers there."""
    values = builder.load(place)
    values.align = kind.dtype.bitwidth // 8
    return values


@inserted
def fetch(_: Any, array: Any, at: Any) -> Any:
    """Have 64 numbers, from a place on, brought into the cache."""
    line = 512 // array.dtype.bitwidth  # numbers
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        for offset in range(0, WORD, line):
            place = builder.gep(data, [builder.add(arguments[1], arguments[1].type(offset))])
            builder.call(prefetch, [builder.bitcast(place, byte), number(0), number(3), number(1)])  # to read, to keep
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@inserted
def pointer(_: Any, address: Any) -> Any:
    """To the memory at an address; an array would take Python a microsecond to make, and as long to hand over."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@inserted
def ones(_: Any, word: Any) -> Any:
    """How many bits are set."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


def zeros(size: int, dtype: Any) -> Numbers:
    """Where torch puts them, at the beginning of a cache line. NumPy does not, and every wide load would touch two."""
    zeros: Numbers = torch.zeros(size, dtype=getattr(torch, np.dtype(dtype).name)).numpy()
    return zeros


class Memory:
    """A vector, and the parts of it that are handed out as tensors."""

    def __init__(self, shapes: Shapes, dtype: Any) -> None:
        ends = np.cumsum([prod(shape) for shape in shapes])
        self.vector = zeros(ends[-1], dtype)
        pieces = np.split(self.vector, ends[:-1])
        self._parts = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self._unheld = self._holders()

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, self._parts))

    @property
    def held(self) -> bool:
        """Whether somebody still has such a tensor, or another one of the same memory."""
        return self._holders() != self._unheld

    def _holders(self) -> list[int]:
        return list(map(sys.getrefcount, self._parts))  # a tensor's memory holds the array it was made of
