"""What the benches of two ranks are asked on the command line."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

RANKS = 2


def arguments(about: str | None) -> argparse.Namespace | None:
    """None, and a line says so, where there are too few GPUs."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, short contexts")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cuda" and gpus < RANKS:
        print(f"skipped: {RANKS} ranks on CUDA need {RANKS} GPUs, and torch sees {gpus}")
        return None
    return args
