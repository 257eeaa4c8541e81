"""`kvrelay trace`: what happened to one request, as the routers of a cluster tell it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import (
    Format,
    FormatOption,
    NameOption,
    RayAddress,
    SetOption,
    TokenFile,
    caller,
)
from kvrelay.errors import ConfigError, KvrelayError

if TYPE_CHECKING:
    from rich.console import Console

    from kvrelay.access.values import Access
    from kvrelay.v1.admin_pb2 import StoryEvent, TraceRequestResponse

ANSWER_S = 10.0
_Answers = dict[str, "TraceRequestResponse"]
"""# router's address |-> what it knows of the request"""


def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The id of an answer, or the x-request-id that the client sent.",
        ),
    ],
    name: NameOption = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A router's internal gRPC address, once for each router: no Ray is asked.",
        ),
    ] = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    format_: FormatOption = Format.TABLE,
    set_: SetOption = None,
) -> None:
    """Show what happened to a request: when, at which workers, and why.

    Each router remembers the requests that ended last.
    """
    from cluster.cli.status.asked import routers_of
    from cluster.on_ray.connect import ray_address as ray_to_join

    if address:
        routers, access = address, caller(name, token_file, set_)
    else:
        routers, access = routers_of(name, ray_to_join(ray_address) or "auto")
    answers = of_routers(request_id, routers, access)
    if format_ is Format.JSON:
        print(json.dumps(as_facts(answers), indent=2))
    else:
        _print(answers)


def of_routers(request_id: str, addresses: Sequence[str], access: Access) -> _Answers:
    """Raises KvrelayError when none knows the request, and says which ones could not be asked."""
    from cluster.process.admin import NotKnown, ask
    from kvrelay.v1.admin_pb2 import TraceRequestRequest

    request = TraceRequestRequest(request_id=request_id)
    answers: _Answers = {}
    unknown: list[KvrelayError] = []
    silent: list[KvrelayError] = []
    for address in addresses:
        try:
            answers[address] = ask(
                address, lambda stub: stub.TraceRequest, request, access, timeout_s=ANSWER_S
            )
        except NotKnown as error:
            unknown.append(error)
        except ConfigError as error:
            silent.append(error)
    if not answers:
        raise KvrelayError("; ".join(map(str, [*unknown[:1], *silent])))
    return answers


def as_facts(answers: _Answers) -> dict[str, object]:
    """JSON: the stories in the order in which their requests were submitted."""
    from google.protobuf.json_format import MessageToDict

    told = [(story, address) for address, found in answers.items() for story in found.stories]
    told.sort(key=lambda one: -one[0].age_s)
    stories = [
        {"router": address}
        | MessageToDict(
            story, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for story, address in told
    ]
    return {"stories": stories, "left_out": sum(found.left_out for found in answers.values())}


def _print(answers: _Answers) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, width=400, highlight=False, markup=False)
    for address, found in answers.items():
        if found.left_out:
            console.print(f"{found.left_out} earlier requests are left out: give an answer's id")
        for story in found.stories:
            console.print(f"{story.request_id} at {address}, submitted {story.age_s:.1f} s ago")
            if story.left_out:
                console.print(f"{story.left_out} events from its middle are left out")
            _print_events(console, story.events)


def _print_events(console: Console, events: Sequence[StoryEvent]) -> None:
    from rich.table import Table

    table = Table("seconds", "what", "worker", "why", box=None)
    for event in events:
        workers = " -> ".join(event.workers) or "-"
        table.add_row(f"{event.at_s:.3f}", event.moment, workers, _why(event))
    console.print(table)


def _why(event: StoryEvent) -> str:
    """With how often it came in a row."""
    if event.times == 1:
        return event.reason or "-"
    often = f"{event.times} times, last at {event.last_s:.3f}"
    return f"{event.reason} ({often})" if event.reason else often
