"""One replay of Dynamo, told as JSON. Runs with the interpreter of .venv-peers/dynamo, alone.

Dynamo counts a first token when its decode worker has run a step; `prompt_computed_ms` is when the
prompt's prefill was over, which is when our first token is there.
"""

import json
import sys

BLOCK_TOKENS = 512


def run(trace: str, router: str, rate: float, blocks: int, workers: int) -> dict:
    from dynamo.replay import run_trace_replay

    report = run_trace_replay(
        trace,
        num_prefill_workers=workers,
        num_decode_workers=workers,
        router_mode=router,
        trace_block_size=BLOCK_TOKENS,
        arrival_speedup_ratio=rate,
        prefill_engine_args=engine("prefill", blocks),
        decode_engine_args=engine("decode", blocks),
        capture_per_request=True,
    )
    requests = report.per_request or []
    computed = [one["source_held_ms"] - one["arrival_time_ms"] for one in requests]
    return {"summary": report.summary, "prompt_computed_ms": computed}


def engine(role: str, blocks: int) -> dict:
    from dynamo.mocker.config import normalize_mocker_config

    return normalize_mocker_config(
        {
            "engine": {
                "backend": "vllm",
                "worker_type": role,
                "block_size": BLOCK_TOKENS,
                "num_gpu_blocks": blocks,
            }
        }
    )


if __name__ == "__main__":
    trace, router, rate, blocks, workers = sys.argv[1:]
    print(json.dumps(run(trace, router, float(rate), int(blocks), int(workers))))
