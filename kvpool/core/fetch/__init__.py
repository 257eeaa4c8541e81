"""KV that a worker gets from elsewhere: from which source, at which cost, how far it is."""
