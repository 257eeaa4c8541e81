"""The log format of every process: lines to stderr with date, time and the process's name."""

from __future__ import annotations

import logging
import os
import re
import sys
from datetime import datetime
from typing import Any

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
PACKAGES = ["kvrelay", "kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster"]


class LineFormatter(logging.Formatter):
    """`DATE-TIME PROCESS LEVEL MESSAGE [REQUEST]`: local time in ISO 8601, with its offset.

    The request's id comes from `extra={"request_id": ...}` of the logging call. What a client has
    sent may be part of any of them, so control characters are written as escapes, and the lines of
    a traceback are indented: nobody can forge a line.
    """

    def __init__(self, process_name: str) -> None:
        escaped = process_name.replace("%", "%%")
        super().__init__(f"%(asctime)s {escaped} %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        local = datetime.fromtimestamp(record.created).astimezone()
        return local.isoformat(timespec="milliseconds")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return _plain(line if request_id is None else f"{line} [{request_id}]")

    def formatException(self, info: Any) -> str:  # noqa: N802
        lines = super().formatException(info).split("\n")
        return "\n".join(f"  {_plain(line)}" for line in lines)


def _plain(line: str) -> str:
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], line)


def configure_logging(process_name: str) -> None:
    """KVRELAY_LOG names the level (debug, info, warning); info if unset.

    Call it before gRPC is imported: gRPC then reads whether to print its own diagnostics, which
    only repeat its errors at length.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    level = os.environ.get("KVRELAY_LOG", "info").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process_name))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    known = level if level in logging.getLevelNamesMapping() else "INFO"
    for package in PACKAGES:
        logging.getLogger(package).setLevel(known)
