"""Transports that read and write a remote peer's memory: NIXL and UCX."""
