"""How every process logs: one line to stderr, with the time and the process's own name."""

from __future__ import annotations

import logging
import os
import sys

PACKAGES = ["kvrelay", "kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster"]


def configure_logging(process_name: str) -> None:
    """KVRELAY_LOG names the level (debug, info, warning); info if unset.

    Before gRPC is imported: it reads then whether to print its own diagnostics, which repeat in
    many words what its errors say.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    level = os.environ.get("KVRELAY_LOG", "info").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {process_name} %(levelname)s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    known = level if level in logging.getLevelNamesMapping() else "INFO"
    for package in PACKAGES:
        logging.getLogger(package).setLevel(known)
