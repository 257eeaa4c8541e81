"""KV blocks: who holds them, how they move between workers, where they are kept."""
