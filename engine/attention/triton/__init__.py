"""Paged attention by our Triton kernels."""
