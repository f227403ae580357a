"""Runs of a few epochs, and what two of them must agree in."""

from exssnet.experiments.config import resolve

SHORT = {"mask_epochs": 2, "weight_epochs": 2, "tasks": 3}


def short(method="exssnet+kkt", seed=0, **changes):
    return resolve("split-digits", method, seed, **(SHORT | changes))


def outcome(record):
    """What two runs of one configuration must agree in."""
    return {key: record[key] for key in record if key not in ("seconds",)}
