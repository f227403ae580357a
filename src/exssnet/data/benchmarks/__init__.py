"""Named data sets: from the hub or a local mirror, decoded once into a cache."""
