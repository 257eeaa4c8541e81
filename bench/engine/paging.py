"""The peer's pages, by whichever name the installed transformers calls their size."""

from __future__ import annotations

from inspect import signature

from transformers import ContinuousBatchingConfig

PAGE_TOKENS = 32


def paging(*, sequences: int, tokens: int, step_tokens: int) -> ContinuousBatchingConfig:
    """Just the pages that so many sequences of so many tokens need: left to itself it takes most of
    the memory."""
    known = signature(ContinuousBatchingConfig).parameters
    name = "page_size" if "page_size" in known else "block_size"
    return ContinuousBatchingConfig(
        num_blocks=sequences * -(-tokens // PAGE_TOKENS),
        max_batch_tokens=step_tokens,
        **{name: PAGE_TOKENS},
    )
