"""How a sequence's KV is cut into blocks and shards, and what the blocks are called."""
