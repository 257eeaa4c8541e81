"""The KV pool of several ranks, as rank 0 has it: on CPUs one piece of shared memory, which the
others map; on CUDA a piece on each GPU, which rank 0 maps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.parallel.channel import Channel
from kvpool.memory.kv_memory import KvMemory
from kvpool.pool.map import PoolMap
from kvpool.transport.cuda_handle import CudaHandle, share


def map_parts(pool: PoolMap, device: torch.device, others: Sequence[Channel]) -> KvMemory:
    """Rank 0's side; `device` reaches the memory of all. Raises PeerError."""
    own = torch.zeros(pool.parts[0].nbytes, dtype=torch.uint8, device=device)
    theirs = [CudaHandle.unpack(one.receive()).map(device) for one in others]
    return KvMemory.of_parts(pool, [own, *theirs])


def offer_part(part: PoolMap, device: torch.device, leader: Channel) -> KvMemory:
    """Another rank's side. Raises ConfigError when CUDA can't share memory."""
    memory = KvMemory(part.layout, part.blocks, device)
    torch.cuda.synchronize(device)  # it is zeros when rank 0 sees it
    leader.send(share(memory.flat).pack())
    return memory
