"""Size of a stored mask compared with its entropy and with one bit per weight, and the time to code it.

    python benchmarks/codec.py --json studies/performance/codec.json

Random masks with the exact number of ones in every layer, coded alone, and with a lender that shares 60 % of the ones
inside a used set about three times as large. Times are medians, on one thread.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from math import log2
from pathlib import Path
from typing import Any

import pyarrow
import torch
from torch import Tensor

from exssnet.cli.console import one_line_errors
from exssnet.core.bank import pack
from exssnet.core.layout import Layout
from exssnet.core.partition import partition
from exssnet.core.selection import keep_counts, select
from exssnet.experiments.environment import device_name, versions
from exssnet.models import build
from exssnet.store.format.codec import decode, encode

NETWORKS: dict[str, tuple[str, tuple[int, ...], int, int]] = {
    "LeNet-300-100": ("lenet-300-100", (1, 28, 28), 10, 1),
    "ResNet-18, width 20": ("resnet18", (3, 32, 32), 100, 20),
    "ResNet-50": ("resnet50", (3, 224, 224), 1000, 64),
}
DENSITIES = (0.05, 0.1, 0.3)
OVERLAP = 0.6


def entropy(layout: Layout, keep: tuple[int, ...]) -> float:
    """Σ n·H(k) over the layers, in bits."""
    shares = [(layer.size, ones / layer.size) for layer, ones in zip(layout.layers, keep, strict=True)]
    return sum(n * (k * log2(1 / k) + (1 - k) * log2(1 / (1 - k))) for n, k in shares)


def overlapping(mask: Tensor, draw: torch.Generator) -> Tensor:
    """A mask of about the same size that shares 60 % of the ones."""
    density = float(mask.float().mean())
    elsewhere = (1 - OVERLAP) * density / (1 - density)
    return torch.rand(len(mask), generator=draw) < torch.where(mask, OVERLAP, elsewhere)


def timed(rounds: int, work: Callable[[], Any]) -> tuple[float, Any]:
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), found


def measure(mask: Tensor, bits: float, rounds: int, **known: Tensor) -> dict[str, Any]:
    encoding, data = timed(rounds, lambda: encode(mask, **known))
    decoding, again = timed(rounds, lambda: decode(data, len(mask), **known))
    assert torch.equal(again, mask)
    packed = bytes(pack(mask).numpy())
    general = {name: 8 * len(press(packed)) / bits for name, press in GENERAL.items()}
    return {
        "bytes": len(data),
        "of entropy": 8 * len(data) / bits,
        "packed bytes": len(packed),
        "of packed": len(data) / len(packed),
        "encode seconds": encoding,
        "decode seconds": decoding,
        "general compressors, of entropy": general,
    }


def huffman(content: bytes) -> bytes:
    press = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return press.compress(content) + press.flush()


# on packed bits, for comparison
GENERAL: dict[str, Callable[[bytes], bytes]] = {
    "zlib, Huffman only": huffman,
    "zstd": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
    "lzma": lzma.compress,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print(f"{'network':20} {'weights':>10}  k     {'contexts':14} {'bytes':>9}  /entropy  /packed  encode s  decode s")
    for title, (name, shape, classes, width) in NETWORKS.items():
        layout = partition(build(name, shape, classes, width)).masked
        for density in DENSITIES:
            draw = torch.Generator().manual_seed(0)
            keep = keep_counts(layout, density)
            mask = select(torch.rand(layout.size, generator=draw), layout, keep)
            lender = overlapping(mask, draw)
            used = lender | (torch.rand(layout.size, generator=draw) < 2 * density)
            for contexts, known in (("none", {}), ("used, lender", {"used": used, "lender": lender})):
                row = measure(mask, entropy(layout, keep), options.rounds, **known)
                print(f"{title:20} {layout.size:10,}  {density:<4}  {contexts:14} {row['bytes']:9,}  "
                      f"{row['of entropy']:8.4f}  {row['of packed']:7.3f}  {row['encode seconds']:8.3f}  "
                      f"{row['decode seconds']:8.3f}")  # fmt: skip
                found.append(
                    {"network": title, "weights": layout.size, "density": density, "contexts": contexts, **row}
                )
    alone = [row for row in found if row["contexts"] == "none"]
    for name in GENERAL:
        shares = ", ".join(f"{row['general compressors, of entropy'][name]:.3f}" for row in alone)
        print(f"{name} on packed bits / entropy, in the order above: {shares}")
    worst = max(row["of entropy"] for row in alone)
    print(f"alone: at most {worst:.4f} × entropy (bound 1.03)")
    if options.json:
        facts = {"rounds": options.rounds, "constriction": version("constriction"), "versions": versions()}
        facts["device"] = device_name("cpu")
        options.json.write_text(json.dumps(facts | {"masks": found}, indent=1) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main()
