"""The checkpoint that `kvrelay serve` loads when no model is named.

This module only says where the folder is. It needs just the standard library, so any process may
import it. `bench/bundled_model` in the repository trained the weights.
"""

from pathlib import Path


def checkpoint_path() -> Path:
    """The folder of the bundled checkpoint, in the layout of `transformers.from_pretrained`."""
    return Path(__file__).resolve().parent / "checkpoint"
