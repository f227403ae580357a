"""Units that are switched on and off for each task."""
