"""Requests that a worker which drains would hold up go elsewhere. Pure.

What it decodes leaves it by `router.core.migration`, sequence by sequence. Here is the rest:
prompts that were not begun where it would prefill or decode, and requests for several answers,
which another worker takes up behind what was delivered.
"""

from __future__ import annotations

from kvrelay.types import Role
from router.core import lifecycle
from router.core.events import Command
from router.core.promises.refusal import DRAINING
from router.core.request import Request, RequestState
from router.core.router_state import RouterState
from router.core.state.worker_view import WorkerView

LOOK_S = 0.1
"""Between two looks at one worker."""


def lead_away(state: RouterState, view: WorkerView, now_s: float) -> list[Command]:
    if now_s < view.led_away_s + LOOK_S:
        return []
    view.led_away_s = now_s
    held_up = [one for one in state.requests.values() if _is_held_up(state, one, view)]
    return [
        command
        for request in held_up
        for command in lifecycle.place_elsewhere(state, request, DRAINING, now_s)
    ]


def _is_held_up(state: RouterState, request: Request, view: WorkerView) -> bool:
    """It would wait for this worker, and another one could take it."""
    if view.incarnation not in request.workers or request.alone:
        return False
    match request.state:
        case RequestState.QUEUED:
            return _has_other(state, request, view)
        case RequestState.PREFILLING:
            return not _has_begun(state, request) and _has_other(state, request, view)
        case RequestState.DECODING:
            several = len(request.choices) > 1 and len(request.workers) == 1
            return several and _has_other(state, request, view)
        case _:
            return False


def _has_begun(state: RouterState, request: Request) -> bool:
    """The prefill of its prompt, or of what it decoded before it left this worker."""
    assert request.placed is not None
    prefiller = state.workers.get(request.placed.candidate.prefiller.incarnation)
    return prefiller is None or prefiller.queue.has_begun(request.key) or bool(request.led_away)


def _has_other(state: RouterState, request: Request, view: WorkerView) -> bool:
    """For its prompt and for its answer, with room for all choices at once."""
    choices = len(request.choices)
    others = [one for one in state.workers.values() if one is not view and _takes(one)]
    decodes = [one for one in others if not one.prefills and one.free_places >= choices]
    prefills = any(one.role is not Role.DECODE for one in others)
    return bool(decodes) and (prefills or state.workers.decode_alone)


def _takes(view: WorkerView) -> bool:
    return not (view.draining or view.suspect)
