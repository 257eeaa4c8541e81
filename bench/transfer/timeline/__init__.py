"""What happens during one handoff, on a time line."""
