"""Adapters that are trained on each task after the other."""

from exssnet.methods.text._adapters import WithAdapters
from exssnet.methods.text._base import AllClassText


class AdapterFineTune(WithAdapters, AllClassText):
    """Train one set of adapters in a frozen encoder on each task after the other."""

    name = "adapter-ft"
