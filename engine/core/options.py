"""Settings for CUDA devices alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """`graphs`: decode steps are recorded and replayed. `fp8_kv`: KV is stored as e4m3.
    `fp8_products`: linear layers multiply in e4m3.
    `goes_first`: before the steps of other workers on the device. `tf32`: fp32 is multiplied with
    ten bits of fraction instead of 23."""

    graphs: bool = True
    fp8_kv: bool = False
    fp8_products: bool = False
    goes_first: bool = False
    tf32: bool = False


DEFAULT_OPTIONS = CudaOptions()
