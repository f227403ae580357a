"""Houlsby's adapters (2019) in a frozen encoder: trained in turn, with replay, or new ones for each task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from exssnet.methods.base import check_whole
from exssnet.methods.text._base import AllClassText, TextMethod, TextSettings
from exssnet.methods.text._memory import TextReplay, TextReplaySettings
from exssnet.methods.text._own import OwnParts
from exssnet.models.adapters import norms, put_in
from exssnet.models.text_classifier import TextClassifier


@dataclass(frozen=True)
class AdapterSettings(TextSettings):
    """`size`: width of the bottleneck. `start`: standard deviation of its first weights."""

    lr: float = 3e-4
    clip: float = 1.0
    size: int = 64
    start: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, size=1)


class WithAdapters(TextMethod):
    """Trains adapters, layer norms and the head; every other weight stays as it is."""

    settings_type: ClassVar[type[Any]] = AdapterSettings
    network: TextClassifier

    def prepare(self) -> None:
        encoder = self.network.encoder.requires_grad_(False)
        put_in(encoder, self.network.width, self.settings.size, self.settings.start, self.generator("adapters"))
        self._norms = {f"encoder.{name}" for name in norms(encoder)}
        for parameter in self.trained().values():
            parameter.requires_grad_(True)
        super().prepare()

    def trained(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.network.named_parameters()
            if ".adapter." in name or name.startswith("head.") or name in self._norms
        }


class AdapterFineTune(WithAdapters, AllClassText):
    """Train one set of adapters in a frozen encoder on each task after the other."""

    name = "adapter-ft"


@dataclass(frozen=True)
class AdapterReplaySettings(AdapterSettings, TextReplaySettings):
    """Those of adapters, and those of replay."""


class AdapterReplay(WithAdapters, TextReplay):
    """Train one set of adapters in a frozen encoder, and replay a few kept texts of each earlier task."""

    name = "adapter-replay"
    settings_type = AdapterReplaySettings
    settings: AdapterReplaySettings


class MultiAdapter(WithAdapters, OwnParts):
    """Train new adapters in a frozen encoder for each task: nothing is forgotten, storage grows with every task."""

    name = "multi-adapter"
