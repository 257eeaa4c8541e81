"""Prompts that wait to be computed, at a prefill worker or at a router: in which order."""
