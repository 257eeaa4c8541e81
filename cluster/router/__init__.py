"""One router process."""
