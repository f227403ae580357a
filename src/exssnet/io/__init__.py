"""Files from outside, read into typed values with limits, and files of ours, written atomically."""
