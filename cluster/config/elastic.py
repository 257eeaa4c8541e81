"""The `elastic` section of a cluster file. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.config.types import Count, Seconds, Section


class ElasticSection(Section):
    """How workers follow what clients ask for, refused requests included: the roles of pools with
    role auto, and the numbers of pools whose replicas are a range."""

    least_prefill: Count = 1
    """At least so many workers keep the role prefill."""
    least_decode: Count = 1
    """At least so many workers keep the role decode."""
    gain: Annotated[float, Field(ge=0, le=1)] = 0.05
    """A change of roles has to serve so much more, as a share of what is served."""
    dwell: Seconds = 15.0
    """Time between two changes of roles, at least."""
    window: Seconds = 20.0
    """Offered prompts are a mean over this time; answers, and all that numbers follow, over three
    times as long."""
    cooldown: Seconds = 300.0
    """Workers leave once fewer were enough for so long."""
    start_up: Seconds = 60.0
    """A worker is added so long before it is needed, until the first ones have shown how long they
    take to start."""
