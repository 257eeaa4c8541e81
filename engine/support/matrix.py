"""The support matrix: each causal family of transformers, whether it is served, and if not, why.

`families.txt` holds what was tried, family by family; `make test-families` tries it again. The list
decides nothing: when a worker starts, the checks of `engine.model` do, which take only `NAMED` from
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvrelay.types import value

FILE = Path(__file__).parent / "families.txt"
EXACT = "exact"

BYPASSES = "its attention bypasses transformers' attention interface"
NAMED: Mapping[str, str] = {
    "falcon": BYPASSES,
    "bloom": BYPASSES,
    "mpt": BYPASSES,
    "qwen3_next": "its linear-attention layers keep a state that is no KV",
    "llama4_text": "its chunked attention is not supported",
    "llama4": "its chunked attention is not supported",
}
"""# family |-> why it is refused by its name"""

CHECKS: Mapping[str, str] = {
    "architecture": "it is no causal language model, its configuration has no vocabulary, or "
    "transformers does not know it",
    "family": f"it is one of {', '.join(sorted(NAMED))}, whose attention can't be stood in for",
    "interface": BYPASSES,
    "layer types": "it has layers other than full and sliding attention, such as linear or sparse "
    "attention",
    "RoPE": "its rotary embedding depends on the longest sequence of a batch (`dynamic`)",
    "layers": "attention was not called once for each layer of the configuration",
    "single call": "a layer calls attention twice",
    "keyword": "a layer's call has an argument that kvrelay's attention does not know",
    "mask": "transformers composes another mask than the layer's call describes, or the model "
    "makes its own. Pairs of positions up to `max_model_len` are compared",
    "cache": "transformers' cache forgets tokens that the layer's call would see",
    "forward": "its forward pass fails on a few tokens",
    "long sequence": "a small random copy (two layers, float32, windows and other borders of 8 "
    "tokens) differs from its own eager forward by more than 0.001 of its logits' range in "
    "sequences of 300 tokens",
    "split": "several ranks share the model, and the logits of its first layers differ from those "
    "of one process by more than the order of summation explains",
    "self": "the checkpoint itself, with its kernels and dtype, differs from its own eager "
    "forward. It may differ by three times what another order of summation does to the eager "
    "logits",
}
"""# check |-> a family is refused when"""


@value
class Formats:
    """What the chat templates of a family's own checkpoints write. `tools`: of tool calls;
    `reasoning`: of what the model thinks before it answers."""

    tools: tuple[str, ...] = ()
    reasoning: str = ""


_THINK = "<think>"
FORMATS: Mapping[str, Formats] = {
    "gpt_oss": Formats(tools=("harmony",), reasoning="harmony"),
    "llama": Formats(tools=("llama3",)),
    "mistral": Formats(tools=("mistral",)),
    "mixtral": Formats(tools=("mistral",)),
    "ministral": Formats(tools=("mistral",)),
    "qwen2": Formats(tools=("hermes",)),
    "qwen2_moe": Formats(tools=("hermes",)),
    "qwen3": Formats(tools=("hermes",), reasoning=_THINK),
    "qwen3_moe": Formats(tools=("hermes", "qwen3-coder"), reasoning=_THINK),
    "smollm3": Formats(tools=("hermes",), reasoning=_THINK),
}
"""# family |-> its formats, where they are known. Sources: the families' model cards and chat
templates on the hub. A checkpoint's own template decides, whatever stands here."""


@value
class Family:
    """`check` is EXACT, or the check that refuses the family."""

    name: str
    check: str
    formats: Formats = Formats()

    @property
    def is_served(self) -> bool:
        return self.check == EXACT

    @property
    def why(self) -> str:
        """Empty: it is served."""
        if self.check == "family":
            return NAMED[self.name]
        return "" if self.is_served else CHECKS.get(self.check, "transformers can't load it")


@value
class Matrix:
    """`transformers`: the version with which the families were tried, as MAJOR.MINOR."""

    transformers: str
    families: tuple[Family, ...]

    @property
    def served(self) -> int:
        return sum(family.is_served for family in self.families)


def support_matrix() -> Matrix:
    first, *lines = FILE.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(": ") for line in lines)
    return Matrix(
        transformers=first.removeprefix("transformers "),
        families=tuple(
            Family(name=name, check=check, formats=FORMATS.get(name, Formats()))
            for name, _, check in pairs
        ),
    )


def checks_table() -> str:
    """As docs/models.md has it."""
    rows = [f"| {check} | {why} |" for check, why in CHECKS.items()]
    return "\n".join(("| check | a family is refused when |", "|---|---|", *rows)) + "\n"


def families_table() -> str:
    """As docs/models.md has it."""
    rows = [
        f"| `{family.name}` | {_state(family)} | {_shown(family.formats)} |"
        for family in support_matrix().families
    ]
    return "\n".join(("| family | state | formats |", "|---|---|---|", *rows)) + "\n"


def _state(family: Family) -> str:
    return EXACT if family.is_served else f"refused: {family.check} check"


def _shown(formats: Formats) -> str:
    tools = f"tools: {' or '.join(formats.tools)}" if formats.tools else ""
    reasoning = f"reasoning: `{formats.reasoning}`" if formats.reasoning else ""
    return "; ".join(part for part in (tools, reasoning) if part) or "-"
