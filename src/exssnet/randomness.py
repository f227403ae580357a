"""Every random draw has an address.

A draw is keyed by the run's seed and by what it is for (`"scores", "birds"`), never by how many draws came
before it. So a resumed run draws what the uninterrupted one drew, and adding a task moves no other task's draws.
"""

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose under a run's seed; unrelated for different seeds or purposes."""
    key = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: str | int, device: str | torch.device = "cpu") -> torch.Generator:
    """A fresh generator for one purpose; the CPU's and the GPU's give different numbers for the same key."""
    return torch.Generator(device=device).manual_seed(derive(seed, *purpose))
