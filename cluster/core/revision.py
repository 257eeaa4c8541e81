"""Which settings a process of a cluster has, as one short word. Pure.

Processes with an older word than the cluster file's are replaced. What kvrelay chooses by itself
from the machines and the numbers of workers is no part of it: a pool that grows replaces nobody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import version

from pydantic import BaseModel

from cluster.config.keys import POOL_KEYS, ROUTER_KEYS, WORKER_KEYS
from cluster.config.schema import Config
from cluster.config.workers import WorkerPool

NO_SETTINGS = {"name", "replicas", "role"}
"""A worker that runs can take another role."""
NOT_THEIRS = ("drain_timeout", "pool.enabled", "network.token_file", "network.key_file")
"""A process that stops is told its time. Whether there are pool nodes is one more question. Where
the caller keeps the token changes nothing; another token needs another cluster."""
LETTERS = 12


def worker_revision(config: Config, pool: WorkerPool) -> str:
    """`config` and `pool` as they were given, not resolved."""
    own = pool.model_dump(mode="json", exclude=NO_SETTINGS)
    has_pool = config.pool.enabled != "off"
    return _word([own, has_pool, _values(config, (*WORKER_KEYS, "name"))])


def router_revision(config: Config) -> str:
    resources = config.router.resources
    return _word([resources, _values(config, ROUTER_KEYS)])


def pool_node_revision(config: Config) -> str:
    return _word([config.pool.resources, _values(config, POOL_KEYS)])


def _values(config: Config, keys: Iterable[str]) -> dict[str, object]:
    return {key: _value(config, key) for key in keys if key not in NOT_THEIRS}


def _value(config: Config, key: str) -> object:
    found: object = config
    for part in key.split("."):
        found = None if found is None else getattr(found, part)
    return _plain(found)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _word(values: object) -> str:
    text = json.dumps([version("kvrelay"), values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]
