"""Prompts that arrive in parts: what has come is computed while the rest is on its way."""
