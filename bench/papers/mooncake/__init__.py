"""Figures of the Mooncake paper, in the simulator."""
