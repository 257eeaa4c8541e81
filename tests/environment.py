"""What all processes of the tests share. Imported before anything reads it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in other processes
# Between fork and exec gRPC's handlers now and then crash a child that uvloop starts.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # One token and key for whatever tests start, in whatever process: see tests/access.py.
    folder = os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="kvrelay-tests-")
    os.environ["KVRELAY_TOKEN_FILE"] = f"{folder}/token"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
TOKEN_FILE = os.environ["KVRELAY_TOKEN_FILE"]
