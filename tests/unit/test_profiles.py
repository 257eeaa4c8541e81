"""Hardware profiles: files to step times, and honest refusals of what was not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config.load import read_yaml
from cluster.sim.profiles.capacity import IDEAL as REACHES_ALL
from cluster.sim.profiles.load import (
    HardwareProfile,
    _bundled,
    known_device,
    known_shape,
    load_profile,
    parse_profile,
)
from cluster.sim.profiles.roofline import Parallel, Precision, roofline_times
from engine.core.step_times import NotCovered, StepTimes, decode_work, prefill_work
from kvrelay.errors import ConfigError

_DATA = Path(__file__).parents[1] / "data"
_SHIPPED = Path(__file__).parents[2] / "deploy/profiles"


def profile(folder: Path, text: str, data: Path | None = None) -> HardwareProfile:
    path = folder / "p.yaml"
    path.write_text(text)
    return load_profile(path, data)


TABLE = """
kind: table
file: t.csv
where: {hardware: x}
"""
ROWS = "hardware,prompt_size,batch_size,prompt_time,token_time\n" + "\n".join(
    [
        "x,100,1,10,5",
        "x,100,1,12,5",
        "x,100,1,90,5",
        "x,100,4,48,8",
        "x,400,1,52,8",
        "y,100,1,1,1",
    ]
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(ROWS)
    return tmp_path


# --- tables -------------------------------------------------------------------------------------


def test_a_table_is_the_line_through_medians(table: Path) -> None:
    times = profile(table, TABLE).times
    assert times.step_s(prefill_work(100)) == pytest.approx(0.012)
    assert times.step_s(prefill_work(250)) == pytest.approx(0.031)
    assert times.step_s(decode_work(400, 9)) == pytest.approx(0.008)


def test_a_mixed_step_is_a_longer_prefill_of_all_tokens(table: Path) -> None:
    times = profile(table, TABLE).times
    mixed = prefill_work(240) + decode_work(10, 500)
    assert times.step_s(mixed) == pytest.approx(1.1 * 0.031)


@pytest.mark.parametrize("tokens", [99, 401])
def test_beyond_its_rows_a_table_says_so(table: Path, tokens: int) -> None:
    with pytest.raises(NotCovered, match=rf"{tokens} tokens in a batch asked.* 100 to 400"):
        profile(table, TABLE).times.step_s(prefill_work(tokens))


def test_a_table_goes_on_where_its_profile_says_so(table: Path) -> None:
    times = profile(table, TABLE + "extrapolate: true\n").times
    assert times.step_s(decode_work(1, 1)) == pytest.approx(0.00401)
    assert times.step_s(prefill_work(700)) == pytest.approx(0.050 + 0.038)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("x,100,1,10,5", "prompt_time is 'much'"),
        ("prompt_size", "no column prompt_size"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, change: str, message: str) -> None:
    bad = ROWS.replace(change, {"prompt_size": "size"}.get(change, "x,100,1,much,5"))
    (tmp_path / "t.csv").write_text(bad)
    with pytest.raises(ConfigError, match=message):
        profile(tmp_path, TABLE)


def test_rows_that_do_not_exist_are_refused(table: Path) -> None:
    with pytest.raises(ConfigError, match="no row has hardware=z"):
        profile(table, TABLE.replace("hardware: x", "hardware: z"))


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: oracle", "kind: got oracle, expected one of linear"),
        ("kind: dynamo", "kv_capacity_tokens: missing"),
        ("{kind: dynamo, kv_capacity_tokens: 0}", "kv_capacity_tokens: got 0"),
        (
            "{kind: dynamo, kv_capacity_tokens: 5, kv_capacity: 5}",
            "did you mean kv_capacity_tokens",
        ),
        ("{kind: dynamo, kv_capacity_tokens: 5, price_per_hour: -1}", "price_per_hour: got -1"),
        ("{kind: dynamo, kv_capacity_tokens: 5, device: h100}", "h100: unknown, expected one of"),
        (
            "{kind: dynamo, kv_capacity_tokens: 5, power_w: {peak: 2, top: 1}}",
            "power_w.top: unknown key",
        ),
        ("{kind: roofline, model: llama-2-7b}", "device: missing"),
        ("{kind: roofline, model: lama, device: l4}", "model lama: neither a folder"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile(tmp_path, text)


def test_what_a_file_leaves_out_comes_from_its_device(tmp_path: Path) -> None:
    text = "{kind: dynamo, kv_capacity_tokens: 5, device: h100-sxm, devices: 4, %s}"
    four = profile(tmp_path, text % "price_per_hour: 1.0")
    assert (four.price_per_hour, four.memory_bytes, four.devices) == (1.0, 320_000_000_000, 4)
    assert four.power_w is not None and four.power_w.peak == 2800
    known = known_device("h100-sxm").price_per_hour
    assert known is not None and profile(tmp_path, text % "name: a").price_per_hour == 4 * known


def test_every_known_device_is_complete() -> None:
    assert all(known_device(name).source for name in _bundled("devices.yaml"))


# --- formulas -----------------------------------------------------------------------------------


LINEAR = (
    "{kind: linear, prefill_overhead_s: 0.001, prefill_token_s: 1.0e-5, prefill_pair_s: 1.0e-8,"
    " decode_kv_token_s: 1.0e-6, decode_knots: [[1, 0.002], [5, 0.004]]}"
)


def test_linear_coefficients_add_up(tmp_path: Path) -> None:
    times = profile(tmp_path, LINEAR).times
    assert times.step_s(prefill_work(100)) == pytest.approx(0.001 + 0.001 + 5050e-8)
    assert times.step_s(decode_work(3, 1000)) == pytest.approx(0.003 + 0.001)
    with pytest.raises(NotCovered, match=r"6\b"):
        times.step_s(decode_work(6, 1))
    with pytest.raises(ConfigError, match="decode_knots: ascending"):
        profile(tmp_path, LINEAR.replace("[5,", "[1,"))


def test_distserve_squares_lengths_and_pays_for_its_pipeline(tmp_path: Path) -> None:
    fitted = {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [18.0, 0.1, 1e-5],
        "decoding_smallbs": [20.0, 1e-3, 0.04],
        "decoding_largebs": [7.0, 1e-3, 0.16],
    }
    (tmp_path / "f.json").write_text(json.dumps({"m": {"1": fitted}}))
    text = "{kind: distserve, file: f.json, model: m, pipeline_parallel: %d}"
    one, two = profile(tmp_path, text % 1).times, profile(tmp_path, text % 2).times
    both = prefill_work(300) + prefill_work(500)
    alone_ms = 18 + 0.1 * 800 + 1e-5 * (300**2 + 500**2)
    assert one.step_s(both) == pytest.approx((alone_ms + 1) / 1000)
    assert two.step_s(both) == pytest.approx((alone_ms / 2 + 2) / 1000)
    assert one.step_s(decode_work(94, 1000)) == pytest.approx((20 + 1 + 0.04 * 94) / 1000)
    assert one.step_s(decode_work(95, 1000)) == pytest.approx((7 + 1 + 0.16 * 95) / 1000)
    with pytest.raises(ConfigError, match="nothing is fitted for m at tensor_parallel 8"):
        profile(tmp_path, "{kind: distserve, file: f.json, model: m, tensor_parallel: 8}")


def test_dynamo_follows_its_polynomials(tmp_path: Path) -> None:
    times = profile(tmp_path, "{kind: dynamo, kv_capacity_tokens: 1000}").times
    expected_ms = 4.209989e-7 * 1e6 + 15.18344 + 16.50142
    assert times.step_s(prefill_work(1000)) == pytest.approx(expected_ms / 1000)
    assert times.step_s(decode_work(8, 500)) == pytest.approx((-25.74 / 4 + 54.01 / 2 + 5.74) / 1e3)
    with pytest.raises(NotCovered, match="1001 KV tokens"):
        times.step_s(decode_work(8, 1001))


# --- roofline -----------------------------------------------------------------------------------

IDEAL = (
    "{kind: roofline, device: %s, model: %s, tensor_parallel: %d, pipeline_parallel: %d,"
    " efficiency: {memory: 1.0, compute: 1.0, overhead_s: 0.0, all_reduce_latency_s: 1.0e-5}}"
)


def ideal(
    folder: Path, tensor: int = 1, pipeline: int = 1, model: str = "llama-3.1-8b"
) -> HardwareProfile:
    return profile(folder, IDEAL % ("h200-sxm", model, tensor, pipeline))


def test_decode_is_bound_by_reading_weights_and_kv(tmp_path: Path) -> None:
    """8B in 16 bits on an H200: 15 GB of weights without the embedding, 131,072 B a token."""
    times = ideal(tmp_path).times
    weights_s = (8.03e9 - 128256 * 4096) * 2 / 4.8e12
    assert times.step_s(decode_work(1, 0)) == pytest.approx(weights_s, rel=1e-3)
    kv_s = times.step_s(decode_work(64, 131_072)) - times.step_s(decode_work(64, 0))
    assert kv_s == pytest.approx(131_072 * 131_072 / 4.8e12, rel=1e-3)


def test_prefill_is_bound_by_operations(tmp_path: Path) -> None:
    """2 operations a parameter and token, and 4 a pair, layer, head and element of it."""
    body = 8.03e9 - 2 * 128256 * 4096
    linear_s = (2 * body * 8192 + 2 * 128256 * 4096) / 989.5e12
    pairs_s = 4 * 32 * 4096 * (8192 * 8193 / 2) / 989.5e12
    found = ideal(tmp_path).times.step_s(prefill_work(8192))
    assert found == pytest.approx(linear_s + pairs_s, rel=1e-3)


def test_tensor_parallelism_divides_all_but_the_all_reduces(tmp_path: Path) -> None:
    one, eight = (ideal(tmp_path, tensor=n).times for n in (1, 8))
    moved_s = 64 * (1e-5 + 2 * 7 / 8 * 8192 * 4096 * 2 / 450e9)
    work = prefill_work(8192)
    assert eight.step_s(work) == pytest.approx(one.step_s(work) / 8 + moved_s)


def test_a_latent_is_kept_by_every_device_and_kvrelay_expands_it(tmp_path: Path) -> None:
    """MLA has one KV head: tensor parallelism shares out no reading of it. Of heads it does."""

    def kv_s(times: StepTimes) -> float:
        return times.step_s(decode_work(1, 100_000)) - times.step_s(decode_work(1, 0))

    latent = known_shape("deepseek-v2")
    assert latent is not None
    four, eight = (
        kv_s(
            roofline_times(
                known_device("h200-sxm"),
                latent,
                precision=Precision(),
                parallel=Parallel(tensor=degree),
                efficiency=REACHES_ALL,
            )
        )
        for degree in (4, 8)
    )
    assert eight == pytest.approx(four, rel=1e-6)
    expanded = kv_s(ideal(tmp_path, tensor=8, model="deepseek-v2").times)
    assert expanded == pytest.approx(four * 128 * (192 + 128) / 576 / 8, rel=1e-6)


def test_a_pipeline_reads_its_weights_for_every_micro_batch(tmp_path: Path) -> None:
    one, four = (ideal(tmp_path, pipeline=n) for n in (1, 4))
    assert four.devices == 4
    assert four.times.step_s(decode_work(4, 0)) >= one.times.step_s(decode_work(4, 0))


def test_a_step_of_prompts_passes_all_stages(tmp_path: Path) -> None:
    one, four = (ideal(tmp_path, pipeline=n) for n in (1, 4))
    assert (one.stages, four.stages) == (1, 4)
    prefill_s = four.times.step_s(prefill_work(8192))
    assert prefill_s == pytest.approx(one.times.step_s(prefill_work(8192)), rel=0.01)


def test_sparse_models_read_the_experts_that_a_batch_touches(tmp_path: Path) -> None:
    times = ideal(tmp_path, tensor=8, model="deepseek-v3").times
    few, many = times.step_s(decode_work(1, 0)), times.step_s(decode_work(256, 0))
    assert many > 5 * few


# --- published tables ---------------------------------------------------------------------------

SILICON = """
kind: silicon
file: h200_measured.csv
where: {model_path: meta-llama/Llama-3.1-70B, backend: trtllm, tp_size: "4"}
"""


def test_silicon_rows_are_met_and_not_left(tmp_path: Path) -> None:
    times = profile(tmp_path, SILICON, _DATA / "silicon").times
    assert times.step_s(decode_work(4, 4 * 1536)) == pytest.approx(0.00798, abs=1e-5)
    assert times.step_s(prefill_work(1024)) == pytest.approx(0.230, abs=1e-3)
    with pytest.raises(NotCovered, match="sequences asked"):
        times.step_s(decode_work(2, 2 * 1536))
    with pytest.raises(NotCovered, match="context in a sequence asked"):
        times.step_s(decode_work(4, 4 * 100))


@pytest.mark.parametrize("path", sorted(_SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_profile_can_be_read(path: Path) -> None:
    raw = read_yaml(path) | {"name": path.stem}
    kind = parse_profile(raw, str(path))
    data = {"table": "splitwise-sim", "distserve": "distserve-sim"}.get(kind.kind)
    if data is None:
        assert load_profile(path).name == path.stem
    else:
        assert load_profile(path, _DATA / data).times.step_s(decode_work(1, 1)) > 0
