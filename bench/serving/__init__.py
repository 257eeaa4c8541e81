"""Whole clusters on this machine, against their peers and limits."""
