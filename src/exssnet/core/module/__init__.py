"""A user's module: what is accepted, its structure without numbers, and how it runs on tensors that are passed in."""
