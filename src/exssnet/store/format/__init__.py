"""The files of a model directory: manifest, base, cards, and tasks."""
