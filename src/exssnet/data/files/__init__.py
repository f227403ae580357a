"""A user's examples: files of images, tables and arrays, and Python objects."""
