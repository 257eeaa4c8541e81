"""One token for all processes of a benchmark, whatever their names: that of a cluster with no name
given. Importing this tells it to the commands that are started."""

from __future__ import annotations

import os

from cluster.access.chosen import TOKEN_KEY
from cluster.access.files import read_or_make, token_path
from kvrelay.access.values import AUTHORIZATION, Access, bearer

os.environ["KVRELAY_TOKEN_FILE"] = str(token_path("kvrelay"))
ACCESS = Access(token=read_or_make(token_path("kvrelay"), TOKEN_KEY))
HEADERS = {AUTHORIZATION: bearer(ACCESS.token)}
