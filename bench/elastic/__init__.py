"""Elastic roles in the simulator: every static split of a fleet, and what changes it as it runs."""
