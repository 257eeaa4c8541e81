"""Our own gRPC servers: a busy port is an error, and ports come from the configured range."""

from __future__ import annotations

import grpc

from kvrelay.errors import ConfigError

MESSAGE_BYTES = 64 * 1024 * 1024
PING_MS, PATIENCE_MS = 10_000, 20_000
"""A client that answers no ping for so long is gone, with its host, or hangs: its calls end."""


def grpc_server() -> grpc.aio.Server:
    """Without so_reuseport, which would let two servers share a port in silence. Keepalive pings
    are welcome at any time: a router sends them while a long step keeps its worker silent."""
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.http2.ping_timeout_ms", PATIENCE_MS),
    ]
    return grpc.aio.server(options=options)


def bind_port(server: grpc.aio.Server, host: str, port_range: tuple[int, int] | None) -> int:
    """A port of the system's choice, or the first free one of the range (ends included)."""
    ports = [0] if port_range is None else range(port_range[0], port_range[1] + 1)
    for port in ports:
        try:
            return int(server.add_insecure_port(f"{host}:{port}"))
        except RuntimeError:
            continue
    where = "any port" if port_range is None else f"ports {port_range[0]} to {port_range[1]}"
    raise ConfigError(f"can't listen on {host}, {where}: check network.host and network.port_range")
