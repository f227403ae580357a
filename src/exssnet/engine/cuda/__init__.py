"""Kernels for NVIDIA GPUs, steps captured as CUDA graphs, and the lock that runs on one GPU share."""
