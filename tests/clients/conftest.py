"""One real cluster with the bundled model, whose tokenizer is a real one, and with a chat template
that has tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.bundled import checkpoint_path
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, split_workers

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Of hermes' kind, without reasoning: a tiny model would never come to its end."""


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tmp_path_factory.mktemp("clients") / "model"
    shutil.copytree(checkpoint_path(), model)
    path: Path = model / "tokenizer_config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    greedy = {"eos_token_id": [0, 2], "temperature": 0.0}  # the same answers in every run
    (model / "generation_config.json").write_text(json.dumps(greedy))
    with WorkerHost() as first, WorkerHost() as second:
        workers = split_workers((first, second), model, compile="off")
        with running_cluster(model, workers) as cluster:
            yield cluster
