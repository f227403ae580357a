"""Frozen encoders: texts to token states, from transformers, word vectors or a random embedding."""

from exssnet.encoders.base import Encoded, Encoder, Text
from exssnet.encoders.found import describe, load
from exssnet.encoders.states import States

__all__ = ["Encoded", "Encoder", "States", "Text", "describe", "load"]
