"""Kernels for a CPU, compiled by numba."""
