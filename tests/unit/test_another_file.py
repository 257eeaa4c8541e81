"""What another cluster file can be for a cluster that runs, and what it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config
from cluster.core.changes import changes, successor
from cluster.core.plan import ClusterPlan, plan_cluster
from cluster.core.resolve import resolve, squeezed
from kvrelay.errors import ConfigError
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_role_wishes import SITE

Pools = list[dict[str, object]]
SPLIT: Pools = [{"role": "prefill"}, {"role": "decode"}]


def plan(pools: Pools = SPLIT, **given: object) -> ClusterPlan:
    values = {(*key.split("__"),): value for key, value in given.items()}
    config = load_config(
        None, [Override(path, value) for path, value in {**values, ("workers",): pools}.items()]
    )
    return plan_cluster(resolve(config, SITE), given=config)


# --- KV of another dtype --------------------------------------------------------------------------

FLOAT32, FLOAT16 = {"model__dtype": "float32"}, {"model__dtype": "float16"}
MIXED = {"transfer__allow_mixed_precision": True}


@pytest.mark.parametrize(
    ("wanted", "kv"),
    [(FLOAT16, "float16"), ({}, "auto"), ({"engine__kv_dtype": "fp8", **FLOAT32}, "fp8")],
)
@pytest.mark.parametrize("mixed", [{}, MIXED])
def test_another_dtype_is_another_cluster(
    wanted: dict[str, object], kv: str, mixed: dict[str, object]
) -> None:
    """Mixed precision must be allowed to those that run too."""
    with pytest.raises(ConfigError, match=f"would have KV in {kv}, .* have it in float32: serve"):
        successor(plan(**FLOAT32), plan(**wanted, **mixed))


def test_another_dtype_replaces_those_that_hand_over_what_is_converted() -> None:
    running, wanted = plan(**FLOAT32, **MIXED), plan(**FLOAT16, **MIXED)
    told = changes(running, successor(running, wanted))
    assert told == [
        f"{pool}: replaced one by one: dtype float32 -> float16" for pool in ("prefill", "decode")
    ]


def test_those_that_hand_nothing_over_may_have_another_dtype() -> None:
    both: Pools = [{"role": "both"}]
    successor(plan(both, **FLOAT32), plan(both, **FLOAT16))
    either: Pools = [{"role": "auto", "replicas": 2, "name": "any"}]
    with pytest.raises(ConfigError, match="any workers would have KV in float16"):
        successor(plan(either, **FLOAT32), plan(either, **FLOAT16))


def test_what_ran_side_by_side_goes_on() -> None:
    """What "auto" is, only workers know."""
    given: Pools = [{"role": "prefill", "dtype": "float32"}, {"role": "decode"}]
    more: Pools = [*given[:1], {"role": "decode", "replicas": 2}]
    assert changes(plan(given), successor(plan(given), plan(more))) == ["decode: 1 -> 2 workers"]


def test_a_new_pool_of_another_dtype_would_not_join() -> None:
    other: Pools = [SPLIT[0], {"role": "decode", "name": "fast", "dtype": "float16"}]
    with pytest.raises(ConfigError, match="fast workers would have KV in float16, and prefill"):
        successor(plan(**FLOAT32), plan(other, **FLOAT32, **MIXED))
    same: Pools = [SPLIT[0], {"role": "decode", "name": "fast"}]
    successor(plan(**FLOAT32), plan(same, **FLOAT32))


# --- nodes that come later ------------------------------------------------------------------------

DEPLOY = REPOSITORY / "deploy"
SHIPPED = sorted([*DEPLOY.glob("configs/*.yaml"), *DEPLOY.glob("kubernetes/**/cluster.yaml")])


def on_ray(config: Config, cpus: int) -> ClusterPlan:
    """Of so many CPUs by now, on nodes of four."""
    node = max(1, min(4, cpus))
    site = replace(SITE, total_cpus=cpus, node_cpus=node, host=None, spans_hosts=True)
    return plan_cluster(resolve(config, site), given=config)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.relative_to(DEPLOY).as_posix())
def test_a_file_that_was_applied_to_an_empty_head_changes_nothing_once_there_are_nodes(
    file: Path,
) -> None:
    """Nor are newcomers other workers, but for threads that the file leaves to kvrelay."""
    config = load_config(file)
    empty, full = on_ray(config, 0), on_ray(config, 12)
    assert changes(empty, successor(empty, full)) == []
    for pool, before, after in zip(
        config.workers, empty.worker_pools, full.worker_pools, strict=True
    ):
        chosen = {"cpu_threads": None} if pool.cpu_threads is None else {}
        assert replace(before.settings, **chosen) == replace(after.settings, **chosen)
        assert chosen or before.placement == after.placement


def test_shipped_files_are_there() -> None:
    assert len(SHIPPED) >= 7


def test_workers_on_nodes_to_come_are_pinned_there_and_threads_are_said_by_the_file() -> None:
    config = load_config(DEPLOY / "kubernetes/base/cluster.yaml")
    plans = [on_ray(config, cpus) for cpus in (0, 12)]
    pools = [pool.settings for one in plans for pool in one.worker_pools]
    assert [(one.cpu_pinning, one.cpu_threads) for one in pools] == [("auto", 2)] * 4


def test_pools_are_named_that_get_one_thread_since_there_are_no_cpus_yet() -> None:
    site = replace(SITE, total_cpus=0, host=None)
    given = load_config(DEPLOY / "kubernetes/base/cluster.yaml").workers
    assert squeezed(given, site) == ()
    asking = (given[0], given[1].model_copy(update={"cpu_threads": None}))
    assert squeezed(asking, site) == ("decode",)
    assert squeezed(asking, replace(site, total_cpus=2)) == ()
