"""Admits requests, places them on workers, and speaks to clients."""
