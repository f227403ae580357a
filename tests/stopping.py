"""A run that is cut off, as by a power failure."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from exssnet.train import Trainer


@contextmanager
def cut_after(monkeypatch: pytest.MonkeyPatch, epochs: int) -> Iterator[None]:
    """What is run inside ends after so many epochs of training."""
    left = iter(range(epochs))
    real = Trainer._epoch

    def epoch(self, *arguments):
        if next(left, None) is None:
            raise SystemExit
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_epoch", epoch)
        with pytest.raises(SystemExit):
            yield
