"""The `elastic` section of a cluster file. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.config.types import Count, Seconds, Section


class ElasticSection(Section):
    """How the workers of pools with role auto follow what clients ask for, refused requests
    included."""

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
