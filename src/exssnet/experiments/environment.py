"""What a result may depend on besides its configuration: the device, and versions."""

from __future__ import annotations

import platform

import torch

from exssnet.version import __version__


def device_name(device: str) -> str:
    """Name of a device in records."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def versions() -> dict[str, str]:
    """Versions that a result may depend on."""
    import numpy

    return {
        "exssnet": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
