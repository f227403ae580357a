"""Sequential fine-tuning of a text encoder: what happens when nothing is done against forgetting."""

from exssnet.methods.text._base import AllClassText


class FineTune(AllClassText):
    """Train the encoder and one classifier on each task after the other."""

    name = "fine-tune"
