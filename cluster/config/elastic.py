"""The `elastic` section of a cluster file. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.config.types import Count, Seconds, Section


class ElasticSection(Section):
    """How workers follow what clients ask for."""

    roles: Literal["fixed", "auto"] = "fixed"
    """auto: workers change between prefill and decode as the offered work asks, refused requests
    included. fixed: each keeps the role of its pool, until it is flipped by hand."""
    least_prefill: Count = 1
    """At least so many workers keep the role prefill."""
    least_decode: Count = 1
    """At least so many workers keep the role decode."""
    gain: Annotated[float, Field(ge=0, le=1)] = 0.05
    """A change of roles has to serve so much more, as a share of what is served."""
    dwell: Seconds = 15.0
    """Time between two changes of roles, at least."""
    window: Seconds = 20.0
    """Offered work is the mean over this time."""
