"""Read untrusted files into typed values with limits, and write files atomically."""
