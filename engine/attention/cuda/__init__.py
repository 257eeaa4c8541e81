"""Attention backends of libraries for CUDA, and decoding by captured graphs."""
