"""Fine-tuning with a memory of one example in a hundred."""

from exssnet.methods.text._memory import TextReplay


class Replay(TextReplay):
    """Fine-tune the encoder, and every tenth step replay a few kept texts of each earlier task."""

    name = "replay"
