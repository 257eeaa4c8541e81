"""The end-to-end measurements of silicon/h200_measured.csv that a roofline can be held against.

Left out, because the file does not say what a roofline needs: prefill and decode on separate
workers (most without their numbers), and attention that is data parallel.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from cluster.sim.profiles.roofline import Precision
from cluster.sim.profiles.schema import Dtype

SHAPES = {
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "zhipuai/GLM-5": "glm-5",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
}
_EXPERT_DEGREES = ("moe_tp_size", "moe_ep_size")
_EXPERTS: dict[str, Dtype] = {"fp8": "float8", "fp4": "float4", "int4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`concurrency` clients in a closed loop, each prompt of `prompt_tokens`."""

    model: str
    backend: str
    version: str
    precision: Precision
    tensor_parallel: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> tuple[str, str, str]:
        """What one set of shares is fitted for: the same model on the same server."""
        return self.model, self.backend, self.version

    @property
    def half(self) -> int:
        """0 or 1, by a digest of the setting: repeats of a setting are in the same half."""
        setting = (*self.group, self.tensor_parallel, self.prompt_tokens, self.output_tokens)
        return blake2b(repr((*setting, self.concurrency)).encode()).digest()[0] & 1


def read_measured(path: Path) -> tuple[list[Measured], Counter[str]]:
    """The rows that count, and how many don't, by reason."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    left_out = Counter(reason for row in rows if (reason := _obstacle(row)))
    return [_measured(row) for row in rows if not _obstacle(row)], left_out


def _obstacle(row: dict[str, str]) -> str:
    """Why a row can't be used; empty when it can."""
    if row["mode"] != "agg":
        return "prefill and decode on separate workers"
    devices = int(row["moe_tp_size"]) * int(row["moe_ep_size"])
    if row["attention_dp_size"] not in ("", "1") or devices > int(row["tp_size"]):
        return "data-parallel attention"
    return ""


def _measured(row: dict[str, str]) -> Measured:
    return Measured(
        model=row["model_path"],
        backend=row["backend"],
        version=row["backend_version"],
        precision=_precision(row),
        tensor_parallel=_tensor_parallel(row),
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        concurrency=int(row["batch_size"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1000,
        tpot_s=float(row["silicon_tpot_ms"]) / 1000,
    )


def _precision(row: dict[str, str]) -> Precision:
    """Four bits are the experts' alone. The file says nothing of KV: 8 bits are assumed for
    TensorRT-LLM, 16 for the others."""
    weights: Dtype = "float8" if row["precision"] == "fp8" else "float16"
    kv: Dtype = "float8" if row["backend"] == "trtllm" else "float16"
    return Precision(weights=weights, experts=_EXPERTS[row["precision"]], kv=kv)


def _tensor_parallel(row: dict[str, str]) -> int:
    """Where experts are divided by both degrees alike, tp_size holds their product: the ids of
    such rows say tp8_ep8 beside 64."""
    ways, tensor, experts = (int(row[key] or 1) for key in ("tp_size", *_EXPERT_DEGREES))
    return tensor if tensor == experts and ways == tensor * experts else ways
