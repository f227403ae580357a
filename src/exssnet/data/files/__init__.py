"""A user's own examples: files of images, tables and arrays, and what is given in Python."""
