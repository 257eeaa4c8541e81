"""What a simulation found: shares, times, use of the pools; as tables, JSON and drawings."""
