"""The contract of kvpool/transport/base.py, over every transport. A new one joins the registry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kvpool.transport.base import MAX_MESSAGE_BYTES, Connection, RegionName
from kvpool.transport.registry import open_endpoint, scheme_of, schemes
from kvrelay.errors import ConfigError, PeerError
from tests.contract.transport_kit import PATIENCE_S, Side, held, send_until_refused, until

MakeSide = Callable[..., Side]


@pytest.fixture(params=schemes())
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_side(scheme: str) -> Iterator[MakeSide]:
    """Sides that close at the end; then nothing may be left of them."""
    before, sides = held(), []

    def make(**options: float) -> Side:
        sides.append(Side(scheme, **options))
        return sides[-1]

    yield make
    for side in sides:
        side.__exit__()
    sides.clear()
    assert held() == before, "threads, descriptors or mappings are left"


def _pair(make_side: MakeSide) -> tuple[Side, Side, Connection]:
    owner, writer = make_side(), make_side()
    return owner, writer, writer.endpoint.connect(owner.endpoint.address)


def _eventually_raises(action: Callable[[], object]) -> None:
    """A peer's end is known after a moment at most."""

    def raises() -> bool:
        try:
            action()
        except PeerError:
            return True
        return False

    until(raises)


def test_both_sides_know_each_other(make_side: MakeSide) -> None:
    owner, writer, connection = _pair(make_side)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    assert connection.peer_address == owner.endpoint.address
    assert accepted.peer_address == writer.endpoint.address
    assert scheme_of(owner.endpoint.address) == scheme_of(writer.endpoint.address)
    assert writer.connected.empty(), "on_connect is for connections that a peer opened"
    accepted.notify(b"to the writer")
    assert writer.next() == b"to the writer"


def test_a_write_is_visible_before_the_notification(make_side: MakeSide) -> None:
    owner, writer, connection = _pair(make_side)
    region = owner.region(100_000)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    for value in range(100):
        connection.write(region.name, 0, torch.full((100_000,), value, dtype=torch.uint8))
        connection.notify(b"filled")
        assert owner.next() == b"filled"
        assert bool((region.memory == value).all())
        accepted.notify(b"free")
        assert writer.next() == b"free"


@pytest.mark.parametrize("count", [0, 1, 7, 4095, 4097, 70_001])
def test_read_returns_what_was_written_and_touches_nothing_else(
    make_side: MakeSide, count: int
) -> None:
    owner, _, connection = _pair(make_side)
    region = owner.region(4 * count + 10)
    region.memory.fill_(255)
    source, target = torch.randn(count), torch.zeros(count)
    connection.write(region.name, 5, source)
    connection.read(region.name, 5, target)
    assert torch.equal(source, target)
    assert torch.equal(region.memory[5 : 5 + 4 * count], source.view(torch.uint8))
    assert bool((region.memory[:5] == 255).all())
    assert bool((region.memory[5 + 4 * count :] == 255).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_any_dtype_and_shape(make_side: MakeSide, dtype: torch.dtype) -> None:
    owner, _, connection = _pair(make_side)
    region = owner.region(1000)
    source = torch.arange(24).reshape(2, 3, 4).to(dtype)
    target = torch.empty_like(source)
    connection.write(region.name, 3, source)
    connection.read(region.name, 3, target)
    assert torch.equal(source, target)


def test_beyond_the_region_is_a_bug(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    region = owner.region(10)
    for offset in (-1, 3):
        with pytest.raises(AssertionError):
            connection.write(region.name, offset, torch.zeros(8, dtype=torch.uint8))


def test_a_window_is_the_region_itself(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    region = owner.region(5000)
    window = connection.window(region.name)
    if window is None:
        pytest.skip("this link cannot map the peer's memory")
    assert (window.dtype, window.shape) == (torch.uint8, (5000,))
    window[1234] = 77
    assert region.memory[1234] == 77
    region.memory[4999] = 78
    assert window[4999] == 78
    again = connection.window(region.name)
    assert again is not None
    assert again.data_ptr() == window.data_ptr(), "mapped once"


def test_two_writers_share_a_region(make_side: MakeSide) -> None:
    owner, first = make_side(), make_side()
    second, region = make_side(), owner.region(2 * 50_000)

    def write(side: Side, half: int) -> None:
        connection = side.endpoint.connect(owner.endpoint.address)
        for value in range(50):
            data = torch.full((50_000,), 100 * half + value, dtype=torch.uint8)
            connection.write(region.name, half * 50_000, data)
        connection.notify(bytes([half]))

    _run_all([lambda: write(first, 0), lambda: write(second, 1)])
    assert {owner.next(), owner.next()} == {b"\0", b"\1"}
    assert bool((region.memory[:50_000] == 49).all())
    assert bool((region.memory[50_000:] == 149).all())


def test_regions_of_one_endpoint_are_apart(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    regions = [owner.region(100 + i) for i in range(8)]
    assert len({region.name for region in regions}) == 8
    for value, region in enumerate(regions):
        connection.write(region.name, 0, torch.full((100,), value, dtype=torch.uint8))
    assert [int(region.memory[99]) for region in regions] == list(range(8))
    assert [region.memory.numel() for region in regions] == [100 + i for i in range(8)]


def test_a_deregistered_region_is_no_target(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    used, never_used, other = owner.region(10), owner.region(10), owner.region(10)
    data = torch.ones(10, dtype=torch.uint8)
    connection.write(used.name, 0, data)
    owner.endpoint.deregister(used)
    owner.endpoint.deregister(used)
    owner.endpoint.deregister(never_used)
    _eventually_raises(lambda: connection.write(used.name, 0, data))
    _eventually_raises(lambda: connection.window(used.name))
    _eventually_raises(lambda: connection.write(never_used.name, 0, data))
    connection.write(other.name, 0, data)
    assert bool((other.memory == 1).all())


def test_a_name_that_was_never_registered(make_side: MakeSide) -> None:
    _, _, connection = _pair(make_side)
    with pytest.raises(PeerError, match="nonsense"):
        connection.write(RegionName("nonsense"), 0, torch.zeros(1))


@pytest.mark.parametrize("rest", ["never-opened", "x" * 300])
def test_an_unknown_address_is_named(make_side: MakeSide, scheme: str, rest: str) -> None:
    with pytest.raises(PeerError, match=f"{scheme}:{rest}"):
        make_side().endpoint.connect(f"{scheme}:{rest}")


def test_messages_are_whole_up_to_the_limit(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    for size in (0, 1, 1000, MAX_MESSAGE_BYTES - 1, MAX_MESSAGE_BYTES, 0):
        payload = bytes(i % 251 for i in range(size))
        connection.notify(payload)
        assert owner.next() == payload
    with pytest.raises(AssertionError):
        connection.notify(bytes(MAX_MESSAGE_BYTES + 1))


def test_messages_keep_their_order_under_load(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    for i in range(5000):
        connection.notify(i.to_bytes(4, "little") + bytes(i % 997))
    for i in range(5000):
        assert owner.next() == i.to_bytes(4, "little") + bytes(i % 997)


def test_streams_do_not_mix(make_side: MakeSide) -> None:
    """Several threads on each of several connections: each thread's messages keep their order."""
    owner = make_side()
    connections = [make_side().endpoint.connect(owner.endpoint.address) for _ in range(3)]

    def stream(connection: Connection, tag: int) -> None:
        for i in range(300):
            connection.notify(bytes([tag]) + i.to_bytes(4, "little") + bytes([tag]) * 500)

    tags = range(2 * len(connections))
    _run_all([lambda tag=t: stream(connections[tag % 3], tag) for t in tags])  # type: ignore[misc]
    seen: dict[int, list[int]] = {tag: [] for tag in tags}
    for _ in range(300 * len(seen)):
        message = owner.next()
        assert message[5:] == message[:1] * 500
        seen[message[0]].append(int.from_bytes(message[1:5], "little"))
    assert all(order == list(range(300)) for order in seen.values())


def test_a_callback_never_runs_on_the_callers_stack(make_side: MakeSide) -> None:
    owner, writer, connection = _pair(make_side)
    owner.on_message = lambda peer: peer.notify(b"answer")
    connection.notify(b"question")
    assert writer.next() == b"answer"
    assert threading.get_ident() not in owner.threads | writer.threads


def test_a_peer_that_does_not_read_slows_the_sender_down(make_side: MakeSide) -> None:
    """Bounded memory: after some messages notify waits, then raises; those taken all arrive."""
    owner, writer = make_side(), make_side(send_timeout_s=0.3)
    connection = writer.endpoint.connect(owner.endpoint.address)
    owner.reading.clear()
    sent, reason = send_until_refused(connection)
    assert "has read nothing for 0.3 s" in reason
    assert 1 <= sent * 60_000 <= 16 * 2**20
    owner.reading.set()
    assert [owner.next()[:4] for _ in range(sent)] == [i.to_bytes(4, "little") for i in range(sent)]
    connection.notify(b"and on it goes")
    assert owner.next() == b"and on it goes"


def test_a_waiting_sender_goes_on_when_the_peer_reads(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    owner.reading.clear()
    sent = threading.Semaphore(0)

    def send() -> None:
        for i in range(500):
            connection.notify(i.to_bytes(4, "little") + bytes(60_000))
            sent.release()

    thread = threading.Thread(target=send)
    thread.start()
    while sent.acquire(timeout=0.3):
        pass
    assert thread.is_alive(), "500 messages of 60 kB were taken though no one reads"
    owner.reading.set()
    for i in range(500):
        assert owner.next()[:4] == i.to_bytes(4, "little")
    thread.join()


@pytest.mark.parametrize("closer", ["connector", "acceptor"])
def test_close_tells_the_other_side_once(make_side: MakeSide, closer: str) -> None:
    owner, writer, connection = _pair(make_side)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    region = owner.region(10)
    near, far = (connection, accepted) if closer == "connector" else (accepted, connection)
    here, there = (writer, owner) if closer == "connector" else (owner, writer)
    near.close()
    near.close()
    assert there.lost.get(timeout=PATIENCE_S) is far
    for gone in (near, far):
        with pytest.raises(PeerError):
            gone.notify(b"")
        with pytest.raises(PeerError):
            gone.window(region.name)
    here.endpoint.close()
    there.endpoint.close()
    assert here.lost.empty(), "on_lost is for the other side's end"
    assert there.lost.empty(), "on_lost came twice"


def test_what_was_sent_before_close_arrives(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    owner.reading.clear()
    for i in range(3):
        connection.notify(bytes([i]) * 1000)
    owner.connected.get(timeout=PATIENCE_S).notify(b"never read by the one who closes")
    connection.close()
    owner.reading.set()
    assert [owner.next()[0] for _ in range(3)] == [0, 1, 2]
    owner.lost.get(timeout=PATIENCE_S)


def test_what_was_not_delivered_before_close_here_is_dropped(make_side: MakeSide) -> None:
    owner, _, connection = _pair(make_side)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    owner.reading.clear()
    for payload in (b"being delivered", b"waits", b"waits too"):
        connection.notify(payload)
    until(lambda: owner.waiting)
    accepted.close()
    owner.reading.set()
    owner.endpoint.close()
    assert owner.next() == b"being delivered"
    assert owner.messages.empty()


def test_a_callback_may_close(make_side: MakeSide) -> None:
    owner, writer, connection = _pair(make_side)
    owner.on_message = lambda peer: peer.close()
    connection.notify(b"go away")
    assert writer.lost.get(timeout=PATIENCE_S) is connection
    again = writer.endpoint.connect(owner.endpoint.address)
    owner.on_message = lambda peer: owner.endpoint.close()
    again.notify(b"go away altogether")
    assert writer.lost.get(timeout=PATIENCE_S) is again


def test_a_restarted_worker_is_a_new_peer(make_side: MakeSide) -> None:
    owner, writer, connection = _pair(make_side)
    old_region = owner.region(10)
    connection.write(old_region.name, 0, torch.ones(10, dtype=torch.uint8))
    owner.endpoint.close()
    assert writer.lost.get(timeout=PATIENCE_S) is connection
    with pytest.raises(PeerError):
        connection.write(old_region.name, 0, torch.ones(10, dtype=torch.uint8))
    with pytest.raises(PeerError, match=owner.endpoint.address):
        writer.endpoint.connect(owner.endpoint.address)
    reborn = make_side()
    new = writer.endpoint.connect(reborn.endpoint.address)
    with pytest.raises(PeerError):
        new.write(old_region.name, 0, torch.ones(10, dtype=torch.uint8))
    region = reborn.region(10)
    new.write(region.name, 0, torch.ones(10, dtype=torch.uint8))
    assert bool(region.memory.all())


@pytest.mark.parametrize("closer", [0, 1])
def test_close_with_work_in_flight(make_side: MakeSide, closer: int) -> None:
    owner, writer, connection = _pair(make_side)
    region, stopped = owner.region(1 << 20), threading.Event()

    def work() -> None:
        data = torch.ones(1 << 20, dtype=torch.uint8)
        try:
            while True:
                connection.write(region.name, 0, data)
                connection.notify(bytes(50_000))
        except PeerError:
            stopped.set()

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        owner.next()
    (owner, writer)[closer].endpoint.close()
    assert stopped.wait(PATIENCE_S)
    thread.join()


def test_close_while_a_sender_waits(make_side: MakeSide) -> None:
    owner, writer, connection = _pair(make_side)
    owner.reading.clear()
    failed: list[PeerError] = []

    def send() -> None:
        try:
            while True:
                connection.notify(bytes(60_000))
        except PeerError as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    connection.close()
    thread.join(timeout=2.0)
    assert not thread.is_alive(), "close does not wait for the send timeout"
    assert "gone" in str(failed[0])
    assert writer.lost.empty()


def test_many_connections_come_and_go(make_side: MakeSide) -> None:
    owner, writer = make_side(), make_side()
    region = owner.region(1000)
    before = held()
    for _ in range(50):
        connection = writer.endpoint.connect(owner.endpoint.address)
        connection.write(region.name, 0, torch.ones(1000, dtype=torch.uint8))
        connection.notify(b"done")
        owner.next()
        connection.close()
        owner.lost.get(timeout=PATIENCE_S)
    del connection
    until(lambda: held() == before)


def test_the_registry_lists_what_exists(make_side: MakeSide) -> None:
    side = make_side()
    callbacks = side.endpoint._callbacks  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'carrier-pigeon'; there are: loopback, shm"):
        open_endpoint("carrier-pigeon", "i", callbacks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="SCHEME:REST"):
        scheme_of("nowhere")


def _run_all(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
