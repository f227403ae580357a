"""What continual learning is measured against: everything at once, separate networks, and no method at all."""
