"""Benchmarks, configurations, runs and their records, metrics."""
