"""Which task of a directory an input belongs to, and how well that is known."""
