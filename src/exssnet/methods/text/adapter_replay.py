"""Adapters that are trained with a memory of one example in a hundred."""

from dataclasses import dataclass

from exssnet.methods.text._adapters import AdapterSettings, WithAdapters
from exssnet.methods.text._memory import TextReplay, TextReplaySettings


@dataclass(frozen=True)
class AdapterReplaySettings(AdapterSettings, TextReplaySettings):
    """Those of adapters, and those of replay."""


class AdapterReplay(WithAdapters, TextReplay):
    """Train one set of adapters in a frozen encoder, and replay a few kept texts of each earlier task."""

    name = "adapter-replay"
    settings_type = AdapterReplaySettings
    settings: AdapterReplaySettings
