"""One pool node: the process that keeps a host's KV tiers."""
