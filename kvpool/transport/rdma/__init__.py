"""Transports that read and write the peer's memory from afar: NIXL and UCX."""
