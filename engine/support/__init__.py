"""Which model families are served, as they were tried: the data of `kvrelay models`."""
