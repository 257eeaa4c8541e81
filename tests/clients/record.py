"""Records what agent SDKs send by default, for `tests/data/sdk_requests.json`:

python -m tests.clients.record
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.clients.environments import SDK_ENVIRONMENT, python_of
from tests.clients.recording import recording
from tests.clients.sdk_calls import SDKS

DATA = Path(__file__).parents[1] / "data" / "sdk_requests.json"
CALLS = Path(__file__).with_name("sdk_calls.py")


def recorded(python: Path, sdk: str) -> dict[str, Any]:
    """Its version and its requests, each once. Raises RuntimeError for a call that failed."""
    with recording() as server:
        done = subprocess.run(
            [python, CALLS, server.url, sdk], capture_output=True, text=True, timeout=300
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        failed = [one for one in told if one["error"]]
        if failed or not told:
            raise RuntimeError(f"{sdk}: {failed or done.stderr}")
        each_once = {json.dumps(one, sort_keys=True): one for one in server.requests}
    requests = [{"path": path, "body": body} for path, body in each_once.values()]
    return {"version": told[0]["version"], "requests": requests}


def main() -> None:
    python = python_of(SDK_ENVIRONMENT)
    DATA.write_text(as_text({sdk: recorded(python, sdk) for sdk in SDKS}), encoding="utf-8")


def as_text(told: dict[str, Any]) -> str:
    """One request a line."""
    parts = [
        f' {json.dumps(sdk)}: {{"version": {json.dumps(one["version"])}, "requests": [\n  '
        + ",\n  ".join(map(json.dumps, one["requests"]))
        + "\n ]}"
        for sdk, one in told.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
