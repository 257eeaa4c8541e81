"""What is read from traces, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.sim.readers import read_trace
from cluster.sim.trace import TracePrompt, TraceRequest, arrivals
from kvpool.core.layout.block_names import BlockNames
from kvpool.core.layout.hashes import CacheSalt
from kvrelay.errors import ConfigError

SALT = CacheSalt(bytes(32))


def row(**changes: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]} | changes


def mooncake(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return path


def azure(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_mooncake_lines_begin_at_zero(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path, row(timestamp=3000), row(timestamp=4500, input_length=512, hash_ids=[1])
    )
    first, second = read_trace(path)
    assert first == TraceRequest(arrival_s=0.0, input_tokens=600, output_tokens=5, hash_ids=(1, 2))
    assert second.arrival_s == 1.5


def test_azure_times_are_differences(tmp_path: Path) -> None:
    path = azure(
        tmp_path, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"
    )
    first, second = read_trace(path)
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (374, 44, None)
    assert second.arrival_s == pytest.approx(4.314579, abs=2e-6)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read_trace(mooncake(tmp_path, row(), row(), {"broken": 1}), limit=2)) == 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(), row(timestamp=-1)], ":2: timestamp: got -1, expected a number from 0"),
        ([row(timestamp=5), row(timestamp=4)], ":2: arrives before the line above it"),
        ([row(hash_ids=[1])], ":1: hash_ids: got 1, expected 2 for 600 tokens"),
        ([row(hash_ids=[1, 2, 3])], ":1: hash_ids: got 3, expected 2"),
        ([row(hash_ids=[1, "2"])], ":1: hash_ids: expected a list of integers"),
        ([row(hash_ids=[1, -2])], ":1: hash_ids: expected a list of integers"),
        ([row(input_length=0)], ":1: input_length: got 0, expected a count from 1"),
        ([row(output_length=1.5)], ":1: output_length: got 1.5"),
        ([row(), {"timestamp": 1}], ":2: input_length: got null"),
        ([row(), [1]], ":2: expected an object"),
        ([], ": no requests in it"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, rows: list[object], says: str) -> None:
    path = mooncake(tmp_path, *rows)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}{says}")


@pytest.mark.parametrize("text", ['{"timestamp": 0', "a,b,c\n1,2,3", "\x00"])
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace:1: (not a line of JSON|expected JSON lines)"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2023-11-16 18:15:46.68,374", ":2: got 2 cells"),
        ("yesterday,374,44", ":2: got yesterday,374,44, expected a time"),
        ("2023-11-16 18:15:46.68,-3,44", ":2: ContextTokens: got -3"),
    ],
)
def test_bad_cells_are_named(tmp_path: Path, line: str, says: str) -> None:
    path = azure(tmp_path, line)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}{says}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: can't read it: No such file"):
        read_trace(tmp_path / "nowhere")


# --- prompts ------------------------------------------------------------------------------------


def prompt(tokens: int, hash_ids: tuple[int, ...] | None, number: int = 0) -> TracePrompt:
    request = TraceRequest(arrival_s=0, input_tokens=tokens, output_tokens=1, hash_ids=hash_ids)
    return TracePrompt(request, number)


@pytest.mark.parametrize("block_size", [512, 128, 16])
def test_equal_hashes_are_equal_names_and_tokens(block_size: int) -> None:
    one, other = prompt(1300, (7, 8, 9)), prompt(1500, (7, 8, 10), number=1)
    names = [p.names(range(len(p) // block_size), block_size, SALT) for p in (one, other)]
    shared = 1024 // block_size
    assert names[0][:shared] == names[1][:shared]
    assert not {*names[0][shared:]} & {*names[1][shared:]}
    assert len({*names[0]}) == 1300 // block_size
    assert [*one[:1024]] == [*other[:1024]]
    assert one[1024] != other[1024]


def test_a_prompt_without_hashes_is_like_no_other() -> None:
    one, other = prompt(1024, None, 1), prompt(1024, None, 2)
    assert not {*one.names(range(2), 512, SALT)} & {*other.names(range(2), 512, SALT)}


def test_parts_of_a_prompt_are_its_tokens() -> None:
    whole = prompt(1300, (7, 8, 9))
    tokens = [whole[i] for i in range(1300)]
    assert [*whole[500:1100]] == tokens[500:1100]
    assert [*whole[500:1100][10:20]] == tokens[510:520]
    assert whole[1290:9999][-1] == tokens[-1]
    assert all(0 <= token < 2**32 for token in tokens)


def test_chains_take_the_names_from_the_prompt() -> None:
    """A worker's, as it grows, and the router's; tenants share none."""
    names, one = BlockNames(fingerprint="f"), prompt(1300, (7, 8, 9))
    chain = names.chain("tenant", len(one), 512)
    chain.extend(one, 600)
    assert len(chain.full(1300)) == 1
    chain.extend(one, 1300)
    router = names.chain("tenant", len(one), 512)
    router.extend(one, 1299)
    lazy = router.full(1299)
    assert [lazy.at(i) for i in range(len(lazy))] == [*chain.full(1300).hashes()]
    stranger = names.chain("other", len(one), 512)
    stranger.extend(one, 1300)
    assert not {*stranger.full(1300).hashes()} & {*chain.full(1300).hashes()}


# --- rates --------------------------------------------------------------------------------------


def test_a_trace_comes_faster_and_several_times() -> None:
    requests = [
        TraceRequest(arrival_s=at_s, input_tokens=512, output_tokens=1, hash_ids=(3,))
        for at_s in (0.0, 10.0, 20.0)
    ]
    once = arrivals(requests, rate_scale=2.0, replicas=1, draw=lambda: 0.5)
    assert [one.request.arrival_s for one in once] == [0.0, 5.0, 10.0]
    twice = arrivals(requests, rate_scale=2.0, replicas=2, draw=lambda: 0.5)
    gap_s = 20.0 / 3 / 2
    assert [one.request.arrival_s for one in twice] == pytest.approx(
        [0.0, gap_s / 2, 5.0, 5.0 + gap_s / 2, 10.0, 10.0 + gap_s / 2]
    )
    names = {name for one in twice for name in one.prompt.names(range(1), 512, SALT)}
    assert len(names) == 2
