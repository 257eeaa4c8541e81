"""One-sided operations of UCX's C library, which ucxx's Python face lacks, on ucxx's own objects.

Only what UCX documents as its stable interface (ucp/api/ucp.h, 1.x): handles are opaque, structures
begin with a mask that says which of their fields count. Every call is thread safe, for ucxx makes
its workers so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kvrelay.errors import PeerError

OK, IN_PROGRESS = 0, 1

_ADDRESS_AND_LENGTH = 0b11
_Handle = ctypes.c_void_p
_Status = ctypes.c_int8  # UCX packs it
_RequestOrError = ctypes.c_ssize_t  # a pointer, none, or a status below zero


class _MapParameters(ctypes.Structure):
    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("not_set", ctypes.c_uint64 * 8),
    )


class _RequestParameters(ctypes.Structure):
    _fields_ = (("op_attr_mask", ctypes.c_uint32), ("not_set", ctypes.c_uint32 * 63))


_PLAIN = ctypes.byref(_RequestParameters())


class Ucp:
    """Contexts, endpoints, memory and keys are handles: plain integers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def declared(name: str, result: object, *arguments: object) -> Callable[..., int]:
            function: Callable[..., int] = library[name]
            function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
            return function

        any_, size = ctypes.c_void_p, ctypes.c_size_t
        address = ctypes.c_uint64
        self._mem_map = declared("ucp_mem_map", _Status, _Handle, any_, any_)
        self._mem_unmap = declared("ucp_mem_unmap", _Status, _Handle, _Handle)
        self._pack = declared("ucp_rkey_pack", _Status, _Handle, _Handle, any_, any_)
        self._release = declared("ucp_rkey_buffer_release", None, any_)
        self._unpack = declared("ucp_ep_rkey_unpack", _Status, _Handle, ctypes.c_char_p, any_)
        self._destroy = declared("ucp_rkey_destroy", None, _Handle)
        move = (_Handle, any_, size, address, _Handle, any_)
        self._put = declared("ucp_put_nbx", _RequestOrError, *move)
        self._get = declared("ucp_get_nbx", _RequestOrError, *move)
        self._flush = declared("ucp_ep_flush_nbx", _RequestOrError, _Handle, any_)
        self._check = declared("ucp_request_check_status", _Status, _Handle)
        self._free = declared("ucp_request_free", None, _Handle)

    def map(self, context: int, address: int, nbytes: int) -> int:
        memory = _Handle()
        parameters = _MapParameters(_ADDRESS_AND_LENGTH, address, nbytes)
        place, result = ctypes.byref(parameters), ctypes.byref(memory)
        _succeed("map memory", self._mem_map(context, place, result))
        return memory.value or 0

    def unmap(self, context: int, memory: int) -> None:
        _succeed("unmap memory", self._mem_unmap(context, memory))

    def pack_key(self, context: int, memory: int) -> bytes:
        """What a peer needs to reach the memory."""
        packed, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        result = ctypes.byref(packed), ctypes.byref(nbytes)
        _succeed("pack a key", self._pack(context, memory, *result))
        key = ctypes.string_at(packed, nbytes.value)
        self._release(packed)
        return key

    def unpack_key(self, endpoint: int, packed: bytes) -> int:
        key = _Handle()
        _succeed("use a key", self._unpack(endpoint, packed, ctypes.byref(key)))
        return key.value or 0

    def destroy_key(self, key: int) -> None:
        self._destroy(key)

    def put(self, endpoint: int, here: int, nbytes: int, there: int, key: int) -> int:
        """A request, 0 when it is done already, or a status below zero."""
        return self._put(endpoint, here, nbytes, there, key, _PLAIN)

    def get(self, endpoint: int, here: int, nbytes: int, there: int, key: int) -> int:
        """As `put`."""
        return self._get(endpoint, here, nbytes, there, key, _PLAIN)

    def flush(self, endpoint: int) -> int:
        """As `put`; done when all that came before it is visible at the peer."""
        return self._flush(endpoint, _PLAIN)

    def status(self, request: int) -> int:
        return request if request <= OK else self._check(request)

    def free(self, request: int) -> None:
        if request > OK:
            self._free(request)


def _succeed(what: str, status: int) -> None:
    if status != OK:
        raise PeerError(f"UCX could not {what} (status {status})")
