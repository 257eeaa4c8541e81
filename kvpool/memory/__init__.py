"""Moves bytes between paged KV memory and slabs."""
