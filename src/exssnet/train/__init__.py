"""The one training loop, what it reports, and how it is interrupted and taken up again."""

from exssnet.train.evaluate import accuracy
from exssnet.train.listener import EpochReport, Listener
from exssnet.train.loop import Trainer, TrainSettings

__all__ = ["EpochReport", "Listener", "TrainSettings", "Trainer", "accuracy"]
