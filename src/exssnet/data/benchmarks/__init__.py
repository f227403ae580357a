"""Data sets known by name: from the hub or a local mirror, decoded once into a cache."""
