"""Seeded small mutations of the cores, and whether the tests notice them."""
