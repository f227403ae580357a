"""NVIDIA GPUs: Triton kernels, steps captured as CUDA graphs, memory format, and the lock of runs that share a GPU."""
