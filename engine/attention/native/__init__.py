"""Paged attention on CPUs by our C++ kernel."""
