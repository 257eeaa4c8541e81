"""One handoff: what travels, in which pieces, by which way and under which lease."""
