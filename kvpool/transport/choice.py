"""Chooses the transports of a worker or pool node whose settings name none. Pure.

Between hosts one is enough, and the UCX libraries of two would disturb each other.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool.transport.link_kind import LinkKind

TRANSPORTS = ("cuda_ipc", "shm", "nixl", "ucx")
"""In order of preference."""
BETWEEN_HOSTS = ("nixl", "ucx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`obstacle`: # transport |-> why it can't be used here, or an empty text; `kind`: # transport
    |-> the kind of its links"""

    obstacle: Callable[[str], str]
    kind: Callable[[str], LinkKind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTransports:
    """The transports in order of preference, and why the others are not among them."""

    transports: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def why(self) -> str:
        """Transports with the same reason are named together."""
        named: dict[str, list[str]] = {}
        for name, why in self.left_out:
            named.setdefault(why, []).append(name)
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in named.items())


def choose_transports(
    machine: Machine, *, on_gpu: bool, spans_hosts: bool, require: Iterable[str] = ()
) -> ChosenTransports:
    """All that this machine can use: within the host cuda_ipc (on a GPU) and shm, between hosts the
    first of nixl and ucx. With `require` only transports of these kinds."""
    required = tuple(require)
    taken: list[str] = []
    left_out: list[tuple[str, str]] = []
    for name in TRANSPORTS:
        far = name in BETWEEN_HOSTS
        if far and any(one in BETWEEN_HOSTS for one in taken):
            continue
        why = _unwanted(name, on_gpu=on_gpu, spans_hosts=spans_hosts)
        why = why or machine.obstacle(name) or _not_required(machine.kind(name), required)
        if why:
            left_out.append((name, why))
        else:
            taken.append(name)
    return ChosenTransports(transports=tuple(taken), left_out=tuple(left_out))


def spans_hosts(host: str) -> bool:
    """True if peers of other hosts can reach a worker that listens there."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _unwanted(name: str, *, on_gpu: bool, spans_hosts: bool) -> str:
    if name == "cuda_ipc" and not on_gpu:
        return "the device is a CPU"
    if name in BETWEEN_HOSTS and not spans_hosts:
        return "all workers are on this host"
    return ""


def _not_required(kind: LinkKind, required: tuple[str, ...]) -> str:
    if kind.meets(required):
        return ""
    return f"it is {kind} and transfer.require is [{', '.join(required)}]"
