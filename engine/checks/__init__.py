"""Logits are compared with those of the model's own code."""
