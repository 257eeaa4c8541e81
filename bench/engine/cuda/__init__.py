"""The engine on CUDA devices, and its kernels."""
