"""A random model of Llama-3.1-8B's shape in bf16, made on the device, and steps for it."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.attention.choosing.choice import choose_backends
from engine.compiled.build import compile_model
from engine.core.sizing import KvSizing
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.family import attention
from engine.model import interface
from engine.model.kv_layout import derive_layout, probe
from engine.model.model import Model
from engine.recording import record_decode
from engine.runner import Engine, EngineFacts
from kvpool.core.layout.layout import BlockId, KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey, Sampling

LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    tie_word_embeddings=False,
)
TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
"""For rehearsals on a CPU."""
_BLOCK_SIZE = 16
_SAMPLING = Sampling(max_tokens=1, seed=0)


def random_engine(
    device: str,
    *,
    tokens: int,
    batch: int,
    backend: str,
    graphs: bool,
    fp8: bool = False,
    config: LlamaConfig = LLAMA_8B,
    layers: int | None = None,
    kv_dtype: str | None = None,
) -> tuple[Engine, str]:
    """Room for `tokens` tokens of KV together; decode steps of up to `batch` are recorded. `fp8`:
    linear layers multiply in FP8. `layers` None: all of them. `kv_dtype` None: the model's; else
    KV begins as zeros. And the attention backend's name."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers or config.num_hidden_layers
    attention.register()
    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=interface.NAME
        )
    module = module.eval().requires_grad_(False)
    model = compile_model(Model(module, config, torch.device(device), torch.bfloat16), fp8=fp8)
    shapes = probe(model)
    layout = derive_layout(shapes, dtype=kv_dtype or model.dtype_name, block_size=_BLOCK_SIZE)
    chosen = choose_backends(backend, model, layout, shapes)[0]
    memory = KvMemory(layout, layout.blocks_for(tokens) + batch, device)
    for plane in memory.planes[0] if kv_dtype is None else ():
        plane.normal_()  # zeros take less power, and so less time
    longest = config.max_position_embeddings
    sizing = KvSizing(
        blocks=memory.blocks, tokens=tokens, max_model_len=longest, kv_bytes=0, reason=""
    )
    facts = EngineFacts(
        architecture="LlamaForCausalLM",
        vocab_size=config.vocab_size,
        max_model_len=longest,
        fingerprint="",
        device=device,
        dtype=model.dtype_name,
    )
    engine = Engine(model, memory, facts, sizing, backend=chosen.open(memory), goes_first=True)
    if graphs:
        record_decode(engine, batch)
    return engine, chosen.name


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def decode_batch(layout: KvLayout, contexts: Sequence[int]) -> StepBatch:
    """One token for each of sequences with so many tokens, the new one counted; their blocks lie
    in no order."""
    free = list(range(sum(map(layout.blocks_for, contexts))))
    random.Random(0).shuffle(free)
    slices = []
    for i, context in enumerate(contexts):
        blocks = [free.pop() for _ in range(layout.blocks_for(context))]
        slices.append(whole_slice(i, (7,), context - 1, blocks))
    return StepBatch(slices=tuple(slices))


def whole_slice(
    number: int, token_ids: tuple[int, ...], start: int, blocks: Sequence[int]
) -> SequenceSlice:
    wanted = SampleRequest(sampling=_SAMPLING, choice=0, prompt_ids=(), emitted_ids=())
    return SequenceSlice(
        key=RequestKey(str(number), 0),
        choice=0,
        token_ids=token_ids,
        start=start,
        tables=(tuple(map(BlockId, blocks)),),
        samples=(wanted,),
    )
