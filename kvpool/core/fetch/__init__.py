"""KV that a worker gets from elsewhere: from which source, at which cost, and its progress."""
