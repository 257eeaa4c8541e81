"""The OpenAI-compatible HTTP face."""
