"""IDBR's pull on two spaces without its questions: the published ablation."""

from exssnet.methods.text.idbr import Disentangled


class Regularization(Disentangled):
    """Learn two spaces of each text, and pull both to what they were; nothing tells them apart."""

    name = "regularization"
    asks = False
