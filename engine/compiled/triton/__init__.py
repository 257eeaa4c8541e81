"""The fused operations of a captured graph on CUDA devices."""
