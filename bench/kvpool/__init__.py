"""KV blocks: memory, names, tiers, codecs."""
