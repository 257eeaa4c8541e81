"""A worker's endpoints of all its transports, in order of preference.

Memory is registered with each of them under one name of our own. `name_over` turns it into the name
that a peer on that transport knows. Whether a transport can be used on this host is tested by
opening it and registering memory.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from uuid import uuid4

import torch

from kvpool.transport import gpudirect, link_kind
from kvpool.transport.link_kind import UCX_SCHEMES, LinkKind
from kvpool.transport.peer.base import Callbacks, Connection, Endpoint, Region, RegionName
from kvpool.transport.peer.rendezvous import ON_DEVICE
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvpool.transport.registry import LOOPBACK_HOST, open_endpoint
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import Incarnation

log = logging.getLogger(__name__)


_SHARES_ONLY_ITS_OWN = "shm"


def scheme_of(address: str) -> str:
    return address.partition(":")[0]


def lies_on_device(address: str) -> bool:
    """Whether the slabs of the end of nixl or ucx with this address do."""
    return address.partition("/")[2].startswith(f"{ON_DEVICE}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegion:
    """Memory that peers may be lent, over one transport or several. Those whose slabs lie on the
    device share one memory, those whose slabs lie on the host another."""

    name: RegionName
    memory: torch.Tensor  # uint8 [bytes]
    over: dict[str, Region]  # scheme |-> as registered there

    def memory_on(self, scheme: str | None) -> torch.Tensor:
        """The memory that a peer on that transport writes to, uint8 `[bytes]`. If the peer is gone
        (None), the slab's header decides."""
        return self.memory if scheme is None else self.over[scheme].memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The arguments of `open_endpoint`. `device` is where the KV is."""

    host: str = LOOPBACK_HOST
    port_range: tuple[int, int] | None = None
    secret: bytes = field(default=b"", repr=False)
    ucx: UcxOptions = field(default_factory=UcxOptions)
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def kind(self, scheme: str) -> LinkKind:
        """The kind of this transport's links for KV on the device, between hosts if it connects
        hosts."""
        if scheme not in UCX_SCHEMES:
            return LinkKind(scheme)
        if link_kind.rdma_obstacle(scheme, self.ucx):
            return LinkKind.TCP
        return LinkKind.RDMA if self.no_gpudirect(scheme) else LinkKind.GPUDIRECT

    def no_gpudirect(self, scheme: str) -> str | None:
        """Why KV passes through host memory over nixl or ucx; None: the network reaches it where it
        lies. Asks UCX in another process, and registers a little memory of the device."""
        if no_rdma_here := link_kind.rdma_obstacle(scheme, self.ucx):
            return no_rdma_here
        if not self.on_gpu:
            return f"KV is on {self.device}"
        known = link_kind.cuda_obstacle(scheme, self.ucx) or gpudirect.no_gpudirect(self.device)
        return known or _refusal(scheme, self.ucx, self.device) or None

    def lacks(self, required: Collection[str], scheme: str) -> str | None:
        """Why nixl or ucx is of none of the required kinds, if one of these is of RDMA."""
        if scheme not in UCX_SCHEMES:
            return None
        if LinkKind.RDMA in required:
            return link_kind.rdma_obstacle(scheme, self.ucx)
        return self.no_gpudirect(scheme) if LinkKind.GPUDIRECT in required else None

    def slabs(self, scheme: str) -> SlabMemory:
        """On the device if the link reaches it there, else on the host."""
        if not self.on_gpu or scheme not in (*UCX_SCHEMES, "cuda_ipc"):
            return SlabMemory()
        why = self.no_gpudirect(scheme) if scheme in UCX_SCHEMES else None
        place = SlabPlace.PINNED if why else SlabPlace.DEVICE
        return SlabMemory(place=place, device=self.device, why_host=why or "")

    def on_device(self, schemes: Iterable[str]) -> bool:
        """Whether slabs that are registered over these are on the device."""
        return any(self.slabs(scheme).place is SlabPlace.DEVICE for scheme in schemes)

    def open(
        self,
        scheme: str,
        incarnation: Incarnation,
        callbacks: Callbacks,
        slabs: SlabMemory | None = None,
    ) -> Endpoint:
        """Without `slabs` its own memory is the host's."""
        return open_endpoint(
            scheme,
            incarnation,
            callbacks,
            host=self.host,
            port_range=self.port_range,
            secret=self.secret,
            ucx=self.ucx,
            slabs=slabs,
            device=self.device,
        )


DEFAULTS = EndpointOptions()


class Endpoints:
    """`schemes` in order of preference. With `require` only links of those kinds are used."""

    def __init__(
        self,
        schemes: Sequence[str],
        incarnation: Incarnation,
        callbacks: Callbacks,
        *,
        options: EndpointOptions = DEFAULTS,
        require: Collection[LinkKind] = (),
    ) -> None:
        """Logs which transports can't be opened, and which move a device's KV through host memory.
        Raises ConfigError when none is left."""
        self._require = frozenset(require)
        self._options = options
        self._open: dict[str, Endpoint] = {}
        self._slabs: dict[str, SlabMemory] = {}
        failures = []
        for scheme in schemes:
            try:
                self._check_kind(scheme)
                slabs = options.slabs(scheme)
                self._open[scheme] = options.open(scheme, incarnation, callbacks, slabs)
                self._slabs[scheme] = slabs
            except (ConfigError, OSError) as error:
                failures.append(str(error))
        if not self._open:
            raise ConfigError(f"no transport can be used: {'; '.join(failures)}")
        for failure in failures:
            log.warning("%s; going on with %s", failure, ", ".join(self._open))
        self._tell_host_slabs()
        self._regions: dict[RegionName, SharedRegion] = {}
        self._numbers = itertools.count()

    def label(self, peer_address: str) -> str:
        """For people: of nixl and ucx it says where the slabs lie, on GPUs at both ends (`-gpu`) or
        at one (`-gpu-host`), or for a GPU here on the host at both (`-host`)."""
        scheme = scheme_of(peer_address)
        if scheme not in UCX_SCHEMES:
            return scheme
        place = self._slabs[scheme].place
        on_device = place is SlabPlace.DEVICE, lies_on_device(peer_address)
        if any(on_device):
            return scheme + ("-gpu" if all(on_device) else "-gpu-host")
        return scheme + ("-host" if place is SlabPlace.PINNED else "")

    def _tell_host_slabs(self) -> None:
        for scheme, slabs in self._slabs.items():
            if slabs.why_host:
                told = "%s moves the KV of %s through host memory: %s"
                log.warning(told, scheme, slabs.device, slabs.why_host)

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(self._open)

    @property
    def addresses(self) -> tuple[str, ...]:
        """One address for each transport, for peers."""
        return tuple(endpoint.address for endpoint in self._open.values())

    def register(self, nbytes: int) -> SharedRegion:
        """New memory. shm shares only its own, so it comes first, and the others whose slabs lie
        on the host use that too."""
        in_turn = sorted(self._open, key=lambda scheme: scheme != _SHARES_ONLY_ITS_OWN)
        over: dict[str, Region] = {}
        for scheme in in_turn:
            shared = self._shared(scheme, over.values())
            over[scheme] = shared or self._open[scheme].register(nbytes)
        return self._named(over[in_turn[0]].memory, over)

    def _shared(self, scheme: str, others: Iterable[Region]) -> Region | None:
        """That of another transport, if this one's slabs may lie there and it can share it."""
        memories = (one.memory for one in others if self._slabs[scheme].takes(one.memory))
        tried = (_adopted(self._open[scheme], memory) for memory in memories)
        return next((region for region in tried if region is not None), None)

    def adopt(self, memory: torch.Tensor) -> SharedRegion:
        """Registers existing memory with each transport that can share it. Raises ConfigError when
        none can."""
        tried = {scheme: _adopted(endpoint, memory) for scheme, endpoint in self._open.items()}
        over = {scheme: region for scheme, region in tried.items() if region is not None}
        if not over:
            raise ConfigError(f"none of {', '.join(self._open)} can share memory of this kind")
        return self._named(memory, over)

    def deregister(self, region: SharedRegion) -> None:
        self._regions.pop(region.name, None)
        for scheme, registered in region.over.items():
            self._open[scheme].deregister(registered)

    def name_over(self, scheme: str, name: str) -> RegionName | None:
        """The name of the region for a peer on that transport; None: the peer can't reach it."""
        region = self._regions.get(RegionName(name))
        over = region.over if region is not None else {}
        return over[scheme].name if scheme in over else None

    def connect(self, addresses: Iterable[str], last: Sequence[str] = ()) -> Connection:
        """Connects over the first transport of our preference that the peer has too and that
        reaches it. Those in `last` are tried after all others, in that order. Raises PeerError that
        names all attempts."""
        theirs = {scheme_of(address): address for address in addresses}
        failures: list[str] = []
        common = [scheme for scheme in self._open if scheme in theirs]
        first = [scheme for scheme in common if scheme not in last]
        for scheme in [*first, *(scheme for scheme in last if scheme in common)]:
            try:
                connection = self._open[scheme].connect(theirs[scheme])
            except PeerError as error:
                failures.append(str(error))
                continue
            if failures:
                log.warning("using %s: %s", scheme, "; ".join(failures))
            return connection
        raise PeerError("; ".join(failures) or self._nothing_common(theirs))

    def close(self) -> None:
        for endpoint in self._open.values():
            endpoint.close()

    def _named(self, memory: torch.Tensor, over: dict[str, Region]) -> SharedRegion:
        name = RegionName(f"region-{next(self._numbers)}")
        region = self._regions[name] = SharedRegion(name=name, memory=memory, over=over)
        return region

    def _check_kind(self, scheme: str) -> None:
        if not self._require or (kind := self._options.kind(scheme)).meets(self._require):
            return
        why = self._options.lacks(self._require, scheme)
        wanted = ", ".join(sorted(self._require))
        reason = f" ({why})" if why else ""
        raise ConfigError(f"transfer.require is [{wanted}] and {scheme} is {kind}{reason}")

    def _nothing_common(self, theirs: Collection[str]) -> str:
        has = ", ".join(theirs) or "no transport"
        wanted = f" (transfer.require is [{', '.join(sorted(self._require))}])"
        ours = ", ".join(self._open) + (wanted if self._require else "")
        return f"no transport in common: the peer has {has}, this worker {ours}"


def _adopted(endpoint: Endpoint, memory: torch.Tensor) -> Region | None:
    try:
        return endpoint.adopt(memory)
    except ConfigError:
        return None


PROBE_BYTES = 4096


def obstacle(
    transport: str,
    ucx: UcxOptions,
    *,
    gpus: int,
    device: str = "cuda",
    slabs: SlabMemory | None = None,
) -> str:
    """Why it can't be used here; empty when it can. `gpus`: number that this process can use.
    `slabs`: where PROBE_BYTES are registered; else on the host."""
    if transport == "cuda_ipc" and not gpus:
        return "no CUDA device"
    nothing = Callbacks(
        on_connect=lambda _: None, on_message=lambda *_: None, on_lost=lambda _: None
    )
    name = Incarnation(f"probe-{uuid4().hex}")
    try:
        endpoint = open_endpoint(transport, name, nothing, ucx=ucx, slabs=slabs, device=device)
    except (ConfigError, OSError, RuntimeError) as error:
        return str(error)
    with contextlib.closing(endpoint):
        try:
            endpoint.register(PROBE_BYTES)
        except (ConfigError, OSError, RuntimeError) as error:
            return f"memory can't be registered: {error}"
    return ""


@cache
def _refusal(scheme: str, ucx: UcxOptions, device: str) -> str:
    """Why the network doesn't take the device's memory; empty: it does. Tried once in a process: a
    worker's budget, slabs and links follow the same answer."""
    slabs = SlabMemory(place=SlabPlace.DEVICE, device=device)
    return obstacle(scheme, ucx, gpus=1, device=device, slabs=slabs)
