"""Paged attention: the backends' common interface, their inputs, and those in plain PyTorch."""
