"""Adapters, layer norms and a head of each task's own in one frozen encoder."""

from exssnet.methods.text._adapters import WithAdapters
from exssnet.methods.text._own import OwnParts


class MultiAdapter(WithAdapters, OwnParts):
    """Train new adapters in a frozen encoder for each task: nothing is forgotten, and storage grows with every task."""

    name = "multi-adapter"
