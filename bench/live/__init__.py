"""Open-loop load on real processes, and the same arrivals in the simulator."""
