"""The clusters that faults hit: plain processes, on Ray, with a second host."""
