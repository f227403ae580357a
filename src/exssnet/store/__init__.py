"""The model directory on disk."""
