"""A compiled model is the model: same logits, same memory, for any batch, from cache or not."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.checks.summation_noise import row_differences
from engine.compiled import build, library, recordings
from engine.compiled.build import compile_model
from engine.compiled.library import Fused
from engine.compiled.recordings import NotRecorded
from engine.core.sizing import EngineLimits
from engine.device import native_build as native
from engine.device.native_build import BuildError
from engine.family.build import load_model
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.model.families import has_experts
from engine.model.interface import attention_state
from engine.model.model import Model
from engine.model.packed_linear import Packed, PackedLinear, rounded, sizes
from tests.models import FAMILIES, random_checkpoint

TOKENS = (1, 2, 3, 7, 16, 33, 64)
FAR = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache() -> None:
    """Nothing has been captured yet."""


@pytest.fixture(autouse=True)
def cache(
    request: pytest.FixtureRequest,
    shared_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """One for all tests, so that a model is captured once; or a test's own."""
    folder = tmp_path / "cache" if "own_cache" in request.fixturenames else shared_cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "kvrelay"


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has not loaded the fused operations yet."""
    monkeypatch.setattr(library, "_library", library.load_library)


def plain_model(
    folder: Path, family: str = "llama", dtype: str = "float32", **changes: object
) -> Model:
    path = random_checkpoint(folder / "model", family, **changes)
    return load_model(open_checkpoint(str(path)), device="cpu", dtype=dtype)


@torch.inference_mode()
def logits(model: Model, tokens: int) -> torch.Tensor:
    ids = torch.arange(tokens)[None] * 37 % 500
    positions = torch.arange(3, 3 + tokens)[None]
    with attention_state(build._OwnTokens()):
        return model.whole(ids, positions, torch.arange(tokens)).float()


def all_logits(model: Model) -> list[torch.Tensor]:
    return [logits(model, tokens) for tokens in TOKENS]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], far: float) -> None:
    assert float(differences(found, expected).max()) <= far


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    return row_differences(torch.cat(found), torch.cat(expected))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in sorted(FAMILIES)),
        *((family, "bfloat16") for family in ("llama", "gemma2", "gpt_oss", "qwen3_moe")),
    ],
)
def test_logits_stay(family: str, dtype: str, tmp_path: Path) -> None:
    model = plain_model(tmp_path, family, dtype)
    expected, nbytes = all_logits(model), model.weight_bytes
    compiled = compile_model(model)
    assert compiled.flat is not None
    chooses = dtype == "bfloat16" and has_experts(model.config)
    for one in (compiled, model):  # the graph, and the modules, packed
        apart = differences(all_logits(one), expected)
        assert float(apart.median() if chooses else apart.max()) <= FAR[dtype]
    assert compiled.weight_bytes == nbytes


def test_all_that_can_be_fused_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    compile_model(plain_model(tmp_path))
    assert "fused: 5 norms, 4 rotations, 2 gates" in caplog.text


def test_products_of_one_input_are_one(tmp_path: Path) -> None:
    compiled = compile_model(plain_model(tmp_path, "qwen2"))  # with biases
    packed = [m.packed for m in compiled.module.modules() if isinstance(m, PackedLinear)]
    widths = [one.width for one in {id(one): one for one in packed}.values()]
    assert widths == [64 + 2 * 32, 64, 2 * 96, 64] * 2 + [512]


@pytest.mark.usefixtures("own_cache")
def test_weights_are_kept_once(tmp_path: Path) -> None:
    model = plain_model(tmp_path)
    linears = [m for m in model.module.modules() if isinstance(m, torch.nn.Linear)]
    weights = [weakref.ref(linear.weight) for linear in linears]
    del linears
    gc.disable()
    try:
        compiled = compile_model(model)
        assert [weight() is None for weight in weights] == [True] * len(weights)
    finally:
        gc.enable()
    assert compiled.flat is not None


def test_a_tied_head_is_packed_beside_the_embedding(tmp_path: Path) -> None:
    model = plain_model(tmp_path, tie_word_embeddings=True)
    expected, nbytes = all_logits(model), model.weight_bytes
    compiled = compile_model(model)
    assert_near(all_logits(compiled), expected, FAR["float32"])
    assert compiled.weight_bytes == nbytes + 512 * 64 * 4


def test_half_precision_keeps_its_weights(tmp_path: Path) -> None:
    """oneDNN packs float16 only for some processors, and the operations are of other types."""
    model = plain_model(tmp_path, dtype="float16")
    expected = all_logits(model)
    compiled = compile_model(model)
    assert compiled.flat is not None
    assert_near(all_logits(compiled), expected, 0.01)


def test_off_leaves_the_model_alone(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path)
    limits = EngineLimits(max_model_len=64, prefill_chunk_tokens=16, max_running_requests=2)
    engine = load_engine(
        open_checkpoint(str(path)), device="cpu", dtype="auto", block_size=16, blocks=8,
        limits=limits, compiled=False,
    )  # fmt: skip
    assert engine.model.flat is None
    assert not any(isinstance(m, PackedLinear) for m in engine.model.module.modules())


@pytest.mark.usefixtures("new_process")
def test_without_a_compiler_operations_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    model = plain_model(tmp_path)
    expected = all_logits(model)
    compiled = compile_model(model)
    assert compiled.flat is not None
    assert_near(all_logits(compiled), expected, FAR["float32"])
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert warned.getMessage() == (
        "compile: operations are not fused: no compiler (g++, clang++, c++) is installed: "
        "install g++"
    )


def test_a_compiler_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SOURCE", replace(library.SOURCE, flags=("-no-such-flag",)))
    with pytest.raises(BuildError, match=r"could not build fused\.cpp .*no-such-flag"):
        library.load_library()


@pytest.mark.usefixtures("own_cache", "new_process")
def test_the_next_start_captures_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain_model(tmp_path)
    expected = all_logits(model)
    compile_model(model)
    made = sorted(path.suffix for path in cache.rglob("*.*"))
    assert made == [".blake2b", ".blake2b", ".json", ".lock", ".lock", ".so"]
    monkeypatch.setattr(recordings, "capture", None)
    monkeypatch.setattr(native, "_compile", None)
    again = compile_model(plain_model(tmp_path))
    assert again.flat is not None
    assert_near(all_logits(again), expected, FAR["float32"])


@pytest.mark.usefixtures("own_cache")
def test_another_model_is_captured_anew(tmp_path: Path, cache: Path) -> None:
    compile_model(plain_model(tmp_path / "a"))
    compile_model(plain_model(tmp_path / "b", rms_norm_eps=1e-3))
    assert len(list(cache.glob("graph-*.json"))) == 2


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("damage", ["", "[", '[["a", "get_attr", "no.such", [], {}, null]]'])
def test_a_damaged_recording_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    model = plain_model(tmp_path)
    expected = all_logits(model)
    compile_model(model)
    (path,) = cache.glob("graph-*.json")
    whole = path.read_text()
    path.write_text(damage)
    again = compile_model(plain_model(tmp_path))
    assert_near(all_logits(again), expected, FAR["float32"])
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "row",
    [
        ["a", "call_method", "view) or print(1", [], {}, None],
        ["a", "call_method", "__reduce__", [], {}, None],
        ["a", "call_function", "operator.attrgetter", [], {}, None],
        ["a", "call_function", "load_library", ["evil.so"], {}, None],
        ["a", "call_function", "aten.view", [], {}, None],
        ["a", "call_method", "view", [], {"x=print(1), y": 1}, None],
        ["a b", "call_method", "view", [], {}, None],
        ["a", "call_method", "view", [{"torch": "load"}], {}, None],
        ["a", "placeholder", "a", [], {}, ["load", [], []]],
    ],
)
def test_only_a_graph_of_tensors_is_read(row: list[object]) -> None:
    """What is read becomes the text of a function."""
    with pytest.raises(NotRecorded):
        recordings.replay(json.dumps([row]), torch.nn.Module())


@pytest.mark.usefixtures("own_cache", "new_process")
def test_a_cache_that_can_not_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = plain_model(tmp_path)
    expected = all_logits(model)
    compiled = compile_model(model)
    assert compiled.flat is not None
    assert_near(all_logits(compiled), expected, FAR["float32"])
    assert "so the next start takes as long" in caplog.text


def test_a_graph_that_computes_otherwise_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rotate = Fused.rotate
    monkeypatch.setattr(Fused, "rotate", lambda self, x, cos, sin: rotate(self, x, sin, cos))
    model = plain_model(tmp_path)
    expected = all_logits(model)
    compiled = compile_model(model)
    assert compiled.flat is None
    assert_near(all_logits(compiled), expected, FAR["float32"])
    assert "the model's own is used" in caplog.text


@pytest.mark.usefixtures("own_cache")
def test_a_model_that_is_no_graph_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = plain_model(tmp_path)
    expected = all_logits(model)
    kind = type(model.module.model)
    forward = kind.forward

    def choosy(self: object, input_ids: torch.Tensor, **more: object) -> object:
        assert input_ids.max() >= 0  # depends on values
        return forward(self, input_ids=input_ids, **more)

    monkeypatch.setattr(kind, "forward", choosy)
    compiled = compile_model(model)
    assert compiled.flat is None
    assert_near(all_logits(compiled), expected, FAR["float32"])
    assert "weights packed, but the forward pass is no graph" in caplog.text


def test_steps_of_any_size_have_few_sizes() -> None:
    sizes = {tokens: rounded(tokens) for tokens in range(1, 2049)}
    assert all(tokens <= size <= 1.25 * tokens for tokens, size in sizes.items())
    assert all(rounded(size) == size for size in sizes.values())
    assert len(set(sizes.values())) < 90
    assert [sizes[tokens] for tokens in (1, 16, 17, 65, 512, 513)] == [1, 16, 20, 80, 512, 576]


@torch.inference_mode()
def test_decode_steps_of_all_sizes_are_prepared() -> None:
    assert sizes(18) == [*range(1, 17), 20]


def test_tokens_that_are_added_are_not_seen(tmp_path: Path) -> None:
    """Attention gets the step's own, and logits are those of the rows that were asked for."""
    compiled = compile_model(plain_model(tmp_path))
    assert compiled.flat is not None
    tokens, seen = 37, set()

    class Watching(build._OwnTokens):
        def attend(self, layer: int, query: torch.Tensor, *more: object) -> torch.Tensor:
            seen.add((layer, query.shape[2]))
            return super().attend(layer, query, *more)

    positions = torch.arange(tokens)[None]
    rows = torch.tensor([36, 2, 2, 0, 30] * 4)
    with attention_state(Watching()):
        found = compiled.whole(positions, positions, rows)
        every = compiled.whole(positions, positions, positions[0])
    assert seen == {(0, tokens), (1, tokens)}
    torch.testing.assert_close(found, every[rows])


def test_a_graph_is_made_once_for_all_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    write = build.write_forward
    monkeypatch.setattr(build, "write_forward", lambda graph: made.append(graph) or write(graph))
    compiled = compile_model(plain_model(tmp_path))
    all_logits(compiled)
    assert len(made) == 2, "one for few tokens, one for many"


def test_preparing_covers_what_steps_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_model(plain_model(tmp_path, "qwen2"))
    sizes: list[tuple[object, int]] = []
    call = Packed.__call__

    def counted(self: Packed, x: torch.Tensor) -> torch.Tensor:
        sizes.append((self.kind, x.shape[-2]))
        return call(self, x)

    monkeypatch.setattr(Packed, "__call__", counted)
    compiled.prepare(37, 5)
    prepared = set(sizes)
    sizes.clear()
    logits(compiled, 37)
    assert len(prepared) == 5
    assert set(sizes) - prepared == {(compiled.module.lm_head.packed.kind, 40)}
    assert prepared - set(sizes) == {(compiled.module.lm_head.packed.kind, 5)}
    assert {size for _, size in sizes} == {40}
