"""Which attention backend a model gets: what it needs, and which is fastest."""
