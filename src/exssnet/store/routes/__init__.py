"""Routing: which task of a directory an input belongs to, and how reliable that is."""
