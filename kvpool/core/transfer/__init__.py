"""One handoff: which KV travels, in which pieces, how, and under which lease."""
