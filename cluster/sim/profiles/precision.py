"""Which number formats a checkpoint's configuration says its weights are in. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.sim.profiles.roofline import Precision
from cluster.sim.profiles.schema import Dtype

_QUANTISED: dict[str, tuple[Dtype, Dtype]] = {
    "fp8": ("float8", "float8"),
    "mxfp4": ("float16", "float4"),
    "gptq": ("int4", "int4"),
    "awq": ("int4", "int4"),
}
"""# quantization_config's quant_method |-> of the dense weights, of the experts'"""


def precision_of(config: Mapping[str, object]) -> Precision:
    """16 bits where nothing is said."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if method in _QUANTISED:
        weights, experts = _QUANTISED[str(method)]
        return Precision(weights=weights, experts=experts)
    stored = config.get("dtype", config.get("torch_dtype"))
    dtype: Dtype = "float32" if stored == "float32" else "float16"
    return Precision(weights=dtype, experts=dtype)
