"""Sequential fine-tuning: what happens when nothing is done against forgetting."""

from exssnet.methods.shared.dense import Dense


class Naive(Dense):
    """Train the one network on each task after the other."""

    name = "naive"
