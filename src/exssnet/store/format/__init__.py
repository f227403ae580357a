"""What lies in a model directory: manifest, base, cards, and the files of tasks."""
