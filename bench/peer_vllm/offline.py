"""Runs in vLLM's environment: `python offline.py MODEL MAX_MODEL_LEN REQUESTS [FRACTION]`.

Reads a JSON object a line, {"prompts": [[ids]], "tokens": n}, and answers each with one:
{"seconds": s, "ids": [[ids]]}, after a first {} when the model is loaded. One process, no prefix
cache.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    model, max_model_len, requests, *fraction = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=int(max_model_len),
        max_num_seqs=int(requests),
        enable_prefix_caching=False,
        disable_log_stats=True,
        **({"gpu_memory_utilization": float(fraction[0])} if fraction else {}),
    )

    def answer(fields: dict[str, object]) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    answer({})
    for line in sys.stdin:
        asked = json.loads(line)
        greedy = SamplingParams(
            temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        begun_s = time.perf_counter()
        found = llm.generate(prompts, greedy, use_tqdm=False)
        seconds = time.perf_counter() - begun_s
        answer({"seconds": seconds, "ids": [list(one.outputs[0].token_ids) for one in found]})


if __name__ == "__main__":
    main()
