"""What happened to one request, moment by moment and why: `kvrelay trace` prints it. Pure.

A request carries its `Story` while it runs. When it ends, the story goes to the `StoryRing`, which
keeps the latest ones. A story of ten events takes about 2 KB, the longest one about 12 KB.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvrelay.messages import LifetimeMoment
from router.core.state.generation import GenerationRequest

MOST_EVENTS = 32
"""Of one story. What lies between the first and the last half of them is left out."""
MOST_REASON = 200
"""Characters."""
MOST_SERVED = 4096
MOST_REFUSED = 1024
"""Refused requests have a ring of their own: overload does not push the served ones out."""
ID_LENGTH = 200
"""Of a client's x-request-id. With what is added it stays below what workers take."""
MOST_TOLD = 16
"""Stories of one answer, the latest: a client may send one x-request-id many times."""


class Moment(StrEnum):
    SUBMITTED = "submitted"
    WAITS = "waits"
    ASKED = "asked"
    TURNED_DOWN = "turned down"
    RESERVED = "reserved"
    QUEUED = "queued"
    SENT_TO_PREFILL = "sent to prefill"
    PREFILL_STARTED = "prefill started"
    FIRST_TOKEN = "first token"
    HANDED_OVER = "handed over"
    DECODES = "decodes"
    CHOICE_DONE = "choice done"
    TRIED_AGAIN = "tried again"
    SUSPECTED = "suspected"
    RUNS_ALONE = "runs alone"
    CLEARED = "cleared"
    MOVED = "moved"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    ABORTED = "aborted"


LIFETIMES: Mapping[str, Moment] = {
    LifetimeMoment.PREFILL_STARTED: Moment.PREFILL_STARTED,
    LifetimeMoment.HANDOFF_COMMITTED: Moment.HANDED_OVER,
    LifetimeMoment.DECODE_JOINED: Moment.DECODES,
}
"""# what a worker tells |-> its moment"""


class StoryEvent(NamedTuple):
    """`at_s` is on the router's clock. Equal events in a row are one that came `times` times, last
    at `last_s`. KV travels from the first of two `workers` to the second."""

    at_s: float
    moment: Moment
    workers: tuple[str, ...]
    reason: str
    times: int
    last_s: float


@dataclass(slots=True)
class Story:
    """`left_out`: events that are not kept."""

    request_id: str
    submitted_s: float
    events: list[StoryEvent] = field(default_factory=list)
    left_out: int = 0

    @staticmethod
    def begun(asked: GenerationRequest, at_s: float) -> Story:
        sampling, tier = asked.sampling, asked.qos_tier
        each = f" for each of {sampling.n} choices" if sampling.n > 1 else ""
        of_tier = f", tier {tier}" if tier else ""
        tokens = f"{len(asked.prompt_ids)} prompt tokens, at most {sampling.max_tokens} more"
        first = StoryEvent(at_s, Moment.SUBMITTED, (), f"{tokens}{each}{of_tier}", 1, at_s)
        return Story(asked.request_id, at_s, [first])

    def note(
        self, moment: Moment, at_s: float, workers: tuple[str, ...] = (), reason: str = ""
    ) -> None:
        events, reason, first_s, times = self.events, reason[:MOST_REASON], at_s, 1
        if events and events[-1][1] is moment and events[-1][1:4] == (moment, workers, reason):
            first_s, *_, times, _ = events.pop()
            times += 1
        events.append(StoryEvent(first_s, moment, workers, reason, times, at_s))
        if len(events) > MOST_EVENTS:
            del events[MOST_EVENTS // 2]
            self.left_out += 1


class StoryRing:
    """Stories of requests that have ended. Of one id only the latest is kept."""

    def __init__(self, most_served: int = MOST_SERVED, most_refused: int = MOST_REFUSED) -> None:
        self._served: OrderedDict[str, Story] = OrderedDict()
        self._refused: OrderedDict[str, Story] = OrderedDict()
        self._most_served = most_served
        self._most_refused = most_refused

    def __len__(self) -> int:
        return len(self._served) + len(self._refused)

    def keep(self, story: Story) -> None:
        """The one that ended first makes room."""
        name = story.request_id
        self._served.pop(name, None)
        self._refused.pop(name, None)
        ring, most = self._served, self._most_served
        if story.events[-1].moment is Moment.REFUSED:
            ring, most = self._refused, self._most_refused
        ring[name] = story
        if len(ring) > most:
            ring.popitem(last=False)

    def find(self, asked: str, running: Iterable[Story]) -> list[Story]:
        """The request of this id; else all that clients know by it, in the order in which they
        were submitted: several tenants may have sent it."""
        known = [*self._refused.values(), *self._served.values(), *running]
        exact = [story for story in known if story.request_id == asked]
        if exact:
            return exact[-1:]
        is_meant = client_id(asked).fullmatch
        meant = [story for story in known if bare_id(story.request_id) == asked]
        meant = meant or [story for story in known if is_meant(bare_id(story.request_id))]
        return sorted(meant, key=lambda story: story.submitted_s)


_TENANT = re.compile(r"[0-9a-f]{8}/")
"""What `router.access.caller` puts before the ids of a tenant's requests."""


def bare_id(request_id: str) -> str:
    """As its client sent it, or was told it."""
    return _TENANT.sub("", request_id, count=1) if _TENANT.match(request_id) else request_id


def client_id(asked: str) -> re.Pattern[str]:
    """Ids of the requests that a client knows as `asked`: its x-request-id, of which HTTP makes
    cmpl-ID-1a2b3c4d, or an answer's id, to which each of several prompts adds its number."""
    if asked.startswith(("cmpl-", "chatcmpl-")):
        return re.compile(rf"{re.escape(asked)}-\d+")
    begins = re.escape(asked[:ID_LENGTH])
    return re.compile(rf"(?:chat)?cmpl-{begins}-[0-9a-f]{{8}}(?:-\d+)?")


def unknown(asked: str) -> str:
    return (
        f"no request {asked!r} is known here: give the id of an answer, or the x-request-id; a "
        f"router remembers the last {MOST_SERVED} requests, and the last {MOST_REFUSED} refused"
    )


def found(tokens: int, source: str) -> str:
    """What a prefill finds of its prompt."""
    return f"{tokens} tokens found ({source})"


def held(tokens: int) -> str:
    """What a decode worker has of the prompt."""
    return f"{tokens} tokens are there already"


def plain(reason: str) -> str:
    return reason.replace("_", " ")


def why(reason: str, message: str) -> str:
    return f"{plain(reason)}: {message}"


def choice_end(choice: int, reason: str) -> str:
    return f"choice {choice}: {reason}"
