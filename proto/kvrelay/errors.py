"""The small hierarchy of errors that are worth telling a user. Pure.

Bugs are assertions, not these errors. Every message says what to do.
"""

from __future__ import annotations

from enum import StrEnum


class RefusalReason(StrEnum):
    """Why a request is not admitted now; clients and metrics see this text."""

    TTFT_UNREACHABLE = "ttft_unreachable"
    TPOT_UNREACHABLE = "tpot_unreachable"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    KV_EXHAUSTED = "kv_exhausted"
    SLOTS_EXHAUSTED = "slots_exhausted"
    TIER_SHARE_EXHAUSTED = "tier_share_exhausted"
    DRAINING = "draining"
    KEY_REQUESTS = "key_requests_exhausted"
    KEY_TOKENS = "key_tokens_exhausted"
    KEY_CONCURRENCY = "key_concurrency_exhausted"
    NO_CAPACITY = "no_capacity"


class FailureReason(StrEnum):
    """Why an admitted request, or one of its attempts, has failed, as far as any code acts on it.
    Workers may send other reasons."""

    KV_MISMATCH = "kv_mismatch"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_CANCELLED = "transfer_cancelled"
    TRANSFER_TIMEOUT = "transfer_timeout"
    HANDOFF_TIMEOUT = "handoff_timeout"
    PEER_LOST = "peer_lost"
    WORKER_LOST = "worker_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    POISON = "poison"
    GRAMMAR = "grammar"
    SLOW_READER = "slow_reader"
    ABORTED = "aborted"
    INTERNAL = "internal"


class KvrelayError(Exception):
    """Base of all errors that kvrelay raises on purpose."""


class ConfigError(KvrelayError):
    """The cluster file or a command-line option is wrong; the message names the key and what was
    expected."""


class ModelError(KvrelayError):
    """The checkpoint can't be served; the message says why."""


class InvalidRequest(KvrelayError):
    """The request can never be served as it is: HTTP 400 (or 404), gRPC INVALID_ARGUMENT.

    `code` is machine readable (`context_length_exceeded`), `param` names the wrong field.
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class ModelNotFound(InvalidRequest):
    """The cluster doesn't serve the requested model: HTTP 404, gRPC NOT_FOUND."""


class NotAuthenticated(InvalidRequest):
    """The call has no valid API key: HTTP 401, gRPC UNAUTHENTICATED."""

    def __init__(self, message: str, *, code: str = "invalid_api_key", param: str | None = None):
        super().__init__(message, code=code, param=param)


class NotAllowed(InvalidRequest):
    """Its API key does not allow this: HTTP 403, gRPC PERMISSION_DENIED."""

    def __init__(self, message: str, *, code: str = "not_allowed", param: str | None = None):
        super().__init__(message, code=code, param=param)


class Refused(KvrelayError):
    """The request can't be served now: HTTP 429 (contended) or 503 (no capacity at all). It has a
    time to come back; None: coming back won't help while the cluster is as it is. `tier`: the QoS
    tier that was applied. `promise`: send it back with the request, at that time, to any router."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None,
        tier: str = "",
        promise: bytes = b"",
    ):
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.tier = tier
        self.promise = promise


class RequestFailedError(KvrelayError):
    """An admitted request could not be finished: HTTP 500/503, gRPC UNAVAILABLE. With the reason
    `poison` it kills workers: HTTP 422, gRPC INVALID_ARGUMENT."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
        self.message = message


class PeerError(KvrelayError):
    """A peer is gone, or doesn't match (fingerprint, wire version)."""
