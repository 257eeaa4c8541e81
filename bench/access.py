"""One token for all processes of a benchmark, whatever their names: that of the environment, else
that of a cluster with no name given. Importing this tells it to the commands that are started."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.access.chosen import TOKEN_KEY
from cluster.access.files import read_or_make, token_path
from kvrelay.access.values import AUTHORIZATION, Access, bearer

_FILE = os.environ.setdefault("KVRELAY_TOKEN_FILE", str(token_path("kvrelay")))
ACCESS = Access(token=read_or_make(Path(_FILE), TOKEN_KEY))
HEADERS = {AUTHORIZATION: bearer(ACCESS.token)}
