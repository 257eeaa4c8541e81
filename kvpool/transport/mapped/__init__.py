"""Transports that map the peer's memory: shared memory and CUDA IPC."""
