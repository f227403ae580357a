"""A mask of bits for each task."""
