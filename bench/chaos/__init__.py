"""Faults under load: what fails, what is wrong, what pauses, and what is left over."""
