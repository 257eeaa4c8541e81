"""Simulates a cluster: the real cores, on a virtual clock."""
