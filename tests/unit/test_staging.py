import pytest

from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.transfer.slabs import CACHED_BYTES, HEADER_BYTES, plan_staging
from kvpool.memory.collate import slab_bytes
from kvrelay.errors import ConfigError

PLANES = (Plane(name="k", heads=2, dim=8), Plane(name="v", heads=2, dim=8))
LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0, 1), planes=PLANES), LayerGroup(layers=(2,), planes=PLANES)),
    dtype="float32",
    block_size=16,
)
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4


def test_auto_is_a_chunk_for_each_transfer() -> None:
    found = plan_staging(LAYOUT, slabs=4, chunk_tokens=512, total_bytes=None, on_cpu=True)
    assert found.slab_bytes == slab_bytes(LAYOUT, 512) == HEADER_BYTES + 512 * TOKEN_BYTES
    assert found.payload_bytes == 512 * TOKEN_BYTES
    assert found.total_bytes == 4 * found.slab_bytes
    assert found.reason == (
        "staging of 0.8 MiB: 4 transfers in flight x 512 tokens (a prefill chunk) x 384 B"
    )


@pytest.mark.parametrize(
    ("on_cpu", "payload"), [(True, CACHED_BYTES), (False, 2**16 * TOKEN_BYTES)]
)
def test_on_a_cpu_a_slab_stays_in_cache(on_cpu: bool, payload: int) -> None:
    found = plan_staging(LAYOUT, slabs=4, chunk_tokens=2**16, total_bytes=None, on_cpu=on_cpu)
    assert found.payload_bytes == payload
    assert ("4.0 MiB (as much as stays in cache)" in found.reason) is on_cpu


@pytest.mark.parametrize("total", [4 * (TOKEN_BYTES + HEADER_BYTES), 100_000, 10**7])
def test_a_given_size_is_not_exceeded_and_well_used(total: int) -> None:
    found = plan_staging(LAYOUT, slabs=4, chunk_tokens=512, total_bytes=total, on_cpu=True)
    assert total - 4 * TOKEN_BYTES < found.total_bytes <= total


def test_too_little_for_one_token_says_what_is_needed() -> None:
    least = 4 * (TOKEN_BYTES + HEADER_BYTES)
    with pytest.raises(ConfigError, match=f"staging_bytes {least - 1} .* at least {least} bytes"):
        plan_staging(LAYOUT, slabs=4, chunk_tokens=512, total_bytes=least - 1, on_cpu=True)
