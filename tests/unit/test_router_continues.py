"""The router's core goes on with a request that another router has begun."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.messages import Prefill, Reserve
from kvrelay.types import FinishReason, Incarnation, Role
from router.core.core import RouterCore
from router.core.events import Admit, Command, Deliver, Refuse, Send, Submitted, WorkerJoined
from tests.unit.router_kit import core_with, hello, piece, request, reserved, says, split, tokens

P, D = Incarnation("p"), Incarnation("d")
LENGTH = FinishReason.LENGTH


def goes_on(
    core: RouterCore,
    *delivered: tuple[int, ...],
    finished: frozenset[int] = frozenset(),
    admitted: bool = True,
) -> list[Command]:
    asked = replace(
        request(n=len(delivered)), delivered=delivered, finished=finished, admitted=admitted
    )
    return core.handle(Submitted(request=asked), 1)


def test_it_goes_on_behind_what_was_delivered() -> None:
    core = split()
    admit, send = goes_on(core, (10, 11))
    assert admit == Admit(request_id="r")
    assert isinstance(send, Send) and isinstance(send.message, Reserve)
    assert send.message.spec.emitted_ids == (10, 11)
    (prefill,) = says(core, "d", reserved())
    assert isinstance(prefill, Send) and isinstance(prefill.message, Prefill), "admitted once"
    told = Deliver(request_id="r", tokens=(piece(12),), done=False)
    assert says(core, "p", tokens(2, 12)) == [told]
    core.validate()


def test_each_choice_goes_on_behind_its_own() -> None:
    core = split()
    _, send = goes_on(core, (10,), (20, 21), (30,), finished=frozenset({2}))
    assert isinstance(send, Send) and isinstance(send.message, Reserve)
    spec = send.message.spec
    assert spec.emitted_ids == ()
    assert [spec.resumed_by(choice) for choice in range(3)] == [(10,), (20, 21), ()]
    assert spec.finished_choices == (2,)
    says(core, "d", reserved())
    says(core, "d", tokens(1, 11, reason=LENGTH))
    (last,) = says(core, "d", tokens(2, 22, choice=1, reason=LENGTH))
    assert isinstance(last, Deliver) and last.done
    core.validate()


def test_it_waits_where_a_new_one_is_refused() -> None:
    core = core_with(places=1, p=Role.PREFILL, d=Role.DECODE)
    core.handle(Submitted(request=request("other")), 0)
    says(core, "d", reserved("other"))
    assert goes_on(core, (10,)) == [Admit(request_id="r")]
    assert "r" in core.state.waiting
    commands = core.handle(WorkerJoined(hello=hello("d2", Role.DECODE)), 2)
    assert [one.worker for one in commands if isinstance(one, Send)] == ["d2"]
    core.validate()


def test_without_its_ticket_it_is_like_a_new_one() -> None:
    core = core_with(places=1, p=Role.PREFILL, d=Role.DECODE)
    core.handle(Submitted(request=request("other")), 0)
    says(core, "d", reserved("other"))
    (refuse,) = goes_on(core, (10,), admitted=False)
    assert isinstance(refuse, Refuse)
