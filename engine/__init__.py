"""Runs a model's steps: from a checkpoint to tokens."""
