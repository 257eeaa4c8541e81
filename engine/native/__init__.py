"""Attention on a CPU by a kernel of ours, built for the host when a worker first needs it."""
