"""Two real workers, and the long prompt whose KV one hands to the other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

from bench.models import KV_OF_8B, SMOLLM_135M
from bench.serving.plain_cluster import HANDED_OVER, PlainCluster, WorkerPlan, plain_cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """`cores` are those of each worker."""

    device: str
    model: LlamaConfig
    what: str
    prompt_tokens: int
    chunk_tokens: int = 512
    cores: int = 1

    @property
    def plans(self) -> tuple[WorkerPlan, ...]:
        return tuple(
            WorkerPlan(role=role, cores=cores, device=self.device)
            for role, cores in (("prefill", self._cores(0)), ("decode", self._cores(1)))
        )

    def _cores(self, worker: int) -> tuple[int, ...]:
        return tuple(range(worker * self.cores, (worker + 1) * self.cores))

    @property
    def max_model_len(self) -> int:
        return self.prompt_tokens + 256

    def prompt(self, number: int, tokens: int | None = None) -> list[int]:
        """Another one for each number: no prefix is found again."""
        shape = (self.prompt_tokens if tokens is None else tokens,)
        generator = torch.Generator().manual_seed(number)
        return torch.randint(2, self.model.vocab_size, shape, generator=generator).tolist()

    def serving(
        self, folder: Path, transport: str, *settings: str, pool: str | None = None
    ) -> AbstractContextManager[PlainCluster]:
        """`folder` holds the model."""
        ours = (
            "engine.block_size=16",
            f"model.max_model_len={self.max_model_len}",
            f"scheduler.prefill_chunk_tokens={self.chunk_tokens}",
            "scheduler.max_running_requests=8",
            f"transfer.transports=[{transport}]",
        )
        workers = (*ours, *settings)
        return plain_cluster(folder, self.plans, workers, pool=pool, router_settings=HANDED_OVER)


_TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=0,
)
"""8 KiB of KV per token: a chunk of 128 makes four layer groups."""
REHEARSAL = Pair(
    device="cpu",
    model=_TINY,
    what="a rehearsal with a tiny model",
    prompt_tokens=512,
    chunk_tokens=128,
)
PAIRS = {
    "cpu": Pair(
        device="cpu",
        model=SMOLLM_135M,
        what="random Llama of SmolLM-135M's shape, bf16, one core each",
        prompt_tokens=2048,
    ),
    "cuda": Pair(
        device="cuda",
        model=KV_OF_8B,
        what="random Llama with Llama-3.1-8B's KV and a twentieth of its compute, bf16, one device",
        prompt_tokens=7500,
        cores=4,
    ),
}
