"""A model's pass on CPUs, fused and compiled at start."""
