"""Text becomes token ids, and tokens become text."""
