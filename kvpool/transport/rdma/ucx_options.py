"""UCX settings for users of the transports that move bytes by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxOptions:
    """A value of None leaves UCX's own, including its environment variables."""

    tls: str | None = None  # transports that UCX may use: "rc,tcp"
    rndv_threshold_bytes: int | None = None
    max_eager_rails: int | None = None
    net_devices: str | None = None  # "mlx5_0:1,mlx5_1:1"
    port_range: tuple[int, int] | None = None  # for UCX's own listeners; set by `open_endpoint`

    def settings(self) -> dict[str, str]:
        """By UCX's names, without their prefix `UCX_`."""
        ports = None if self.port_range is None else f"{self.port_range[0]}-{self.port_range[1]}"
        by_name = {
            "TLS": self.tls,
            "RNDV_THRESH": self.rndv_threshold_bytes,
            "MAX_EAGER_RAILS": self.max_eager_rails,
            "NET_DEVICES": self.net_devices,
            "TCP_PORT_RANGE": ports,
        }
        return {name: str(value) for name, value in by_name.items() if value is not None}

    def __str__(self) -> str:
        set_ = ", ".join(f"UCX_{name}={value}" for name, value in self.settings().items())
        return set_ or "its own defaults"
