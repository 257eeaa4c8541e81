"""The simulated machines: a clock, the network, and each host's memory, disk and pool node."""
