"""The README's table of figures: measured by the benches, each row with its command and commit."""
