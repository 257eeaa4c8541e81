"""`kvrelay status`: the state of a cluster and of its KV, asked once, as tables or JSON."""
