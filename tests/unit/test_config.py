"""The cluster file: what is refused and how it is said, overrides, and what "auto" becomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config
from cluster.config.types import format_duration, format_size, parse_duration_s, parse_size_bytes
from cluster.config.workers import Replicas
from cluster.core.plan import (
    NODE_HOST,
    ClusterPlan,
    RayResources,
    plan_cluster,
    router_settings,
    shortage,
)
from cluster.core.resolve import Site, resolve
from kvrelay.access.values import Secrets
from kvrelay.errors import ConfigError
from kvrelay.types import Role

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
SITE = Site(total_cpus=8, node_cpus=8, host="127.0.0.1", bundled_path="/bundled/checkpoint")


def set_(*texts: str) -> Config:
    return load_config(None, [Override.parse(text) for text in texts])


REFUSED = {
    "nam=x": "nam: unknown key, did you mean name?",
    "workers.0.name=router": 'workers.0.name: got "router", expected another name than router, '
    "pool, controller",
    "workers=[{role: both}, {name: both, role: both}]": "workers: got a list of 2, expected "
    "another name for each pool, not both twice",
    "workers.0.rol=2": "workers.0.rol: unknown key, did you mean role?",
    "router.zzz=1": "router.zzz: unknown key, expected one of admission, api_key_hashes, api_keys, "
    "conversations, directory_memory, dispatch, failover_patience, grpc_port, host, http_port, "
    "internal_grpc_port, internal_host, internal_http_port, lame_duck, max_body, open_metrics, "
    "placement, public_metrics, record, record_size, replicas, resources, same_ports",
    "engine.block_size=7": "engine.block_size: got 7, expected greater than or equal to 8",
    "engine.block_size=129": "engine.block_size: got 129, expected less than or equal to 128",
    "engine.block_size=16.0": "engine.block_size: got 16.0, expected a valid integer",
    "engine.memory_fraction=1.1": "engine.memory_fraction: got 1.1, "
    "expected less than or equal to 1",
    "engine.kv_memory=2": "engine.kv_memory: got 2, expected a size with its unit "
    '(B, KB, MB, GB, KiB, MiB, GiB), such as "2GiB"',
    "engine.kv_memory=2Gib": 'engine.kv_memory: got "2Gib", expected a size with its unit '
    '(B, KB, MB, GB, KiB, MiB, GiB), such as "2GiB"',
    "transfer.lease_ttl=30": "transfer.lease_ttl: got 30, expected a duration with its unit "
    '(ms, s, m, h), such as "30s"',
    "transfer.lease_ttl=0s": 'transfer.lease_ttl: got "0s", expected a duration with its unit '
    '(ms, s, m, h), such as "30s"',
    "transfer.transports=[pigeon]": "transfer.transports.0: got \"pigeon\", expected 'shm', "
    "'nixl', 'ucx' or 'cuda_ipc' (and 1 more)",
    "transfer.canary_every=-1": "transfer.canary_every: got -1, "
    "expected greater than or equal to 0",
    "workers.0.replicas=0": "workers.0.replicas: got 0, expected a number from 1, or "
    "{min: 2, max: 8}",
    "workers.0.replicas=true": "workers.0.replicas: got true, expected a number from 1, or "
    "{min: 2, max: 8}",
    "workers.0.replicas={min: 3, max: 2}": "workers.0.replicas: expected min: at most max, which "
    "is 2",
    "workers.0.role=foo": "workers.0.role: got \"foo\", expected 'prefill', 'decode' or 'both'",
    "workers.0.device=gpu": 'workers.0.device: got "gpu", expected auto, cpu, cuda or cuda:N',
    "workers.0.parallel.tensor=0": "workers.0.parallel.tensor: got 0, "
    "expected greater than or equal to 1",
    "workers.0={role: prefill, device: 'cuda:1', parallel: {tensor: 2}}": "workers.0.parallel: "
    "expected tensor: 1 on device cuda:1: several ranks need cuda, or cpu",
    "workers.0={role: prefill, device: cuda, resources: {GPU: 0.5}, parallel: {tensor: 2}}": ""
    "workers.0.parallel: expected tensor: as many ranks as resources.GPU, which is 0.5",
    "workers.0={role: prefill, cpu_threads: 3, parallel: {tensor: 2}}": "workers.0.parallel: "
    "expected tensor: ranks that divide the 3 cpu_threads",
    "workers.0={role: prefill, device: 'cuda:1', parallel: {pipeline: 2}}": "workers.0.parallel: "
    "expected pipeline: 1 on device cuda:1: several ranks need cuda, or cpu",
    "workers.0={role: prefill, cpu_threads: 6, parallel: {tensor: 2, pipeline: 2}}": ""
    "workers.0.parallel: expected tensor x pipeline: ranks that divide the 6 cpu_threads",
    "workers.0={role: prefill, resources: {GPU: 2}, parallel: {tensor: 2, pipeline: 2}}": ""
    "workers.0.parallel: expected tensor x pipeline: as many ranks as resources.GPU, which is 2",
    "router.replicas=0": "router.replicas: got 0, expected greater than or equal to 1",
    "router.http_port=50051": "router: expected different ports for http_port and "
    "grpc_port: HTTP on 50051, gRPC on 50051 share 50051",
    "router={http_port: 8000, grpc_port: 8002, replicas: 3}": "router: expected "
    "different ports for http_port and grpc_port: HTTP on 8000 to 8002, gRPC on 8002 to 8004 share "
    "8002",
    "router={http_port: 8002, grpc_port: 8000, replicas: 3}": "router: expected "
    "different ports for http_port and grpc_port: HTTP on 8002 to 8004, gRPC on 8000 to 8002 share "
    "8002",
    "router={replicas: 2, dispatch: shared_queue}": "router: expected one router "
    "with dispatch: shared_queue: each router would have its own queue, and they "
    "don't know each other's",
    "router={grpc_port: 65534, replicas: 3}": "router: expected ports up to 65535: "
    "gRPC on 65534 to 65536 is too high",
    "router.internal_grpc_port=8000": "router: expected different ports for http_port and "
    "internal_grpc_port: HTTP on 8000, internal gRPC on 8000 share 8000",
    "router={http_port: 8000, grpc_port: 8902, replicas: 3}": "router: expected different ports "
    "for grpc_port and internal_http_port: gRPC on 8902 to 8904, internal HTTP on 8900 to 8902 "
    "share 8902",
    "router.internal_http_port=none": 'router.internal_http_port: got "none", expected a valid '
    "integer",
    "router.http_port=65536": "router.http_port: got 65536, expected less than or equal to 65535",
    "network.port_range=[9, 3]": "network.port_range: got a list of 2, "
    "expected [first, last] with 1024 <= first <= last",
    "model.path=3": "model.path: got 3, expected a valid string",
    "model.dtype=fp8": "model.dtype: got \"fp8\", expected 'auto', 'float32', "
    "'bfloat16' or 'float16'",
    "engine=3": "engine: got 3, expected an object",
    "name=My_Cluster": 'name: got "My_Cluster", expected a-z, 0-9 and inner dashes',
    "workers=[]": "workers: got a list of 0, "
    "expected a prefill pool and a decode pool, or a pool of role both",
    "workers=[{role: prefill}]": "workers: got a list of 1, "
    "expected a decode pool beside the prefill pool",
    "workers=[{role: decode}, {role: both}]": "workers: got a list of 2, "
    "expected a prefill pool beside the decode pool",
    "qos.tiers={a: {share: 0.7}, b: {share: 0.4, default: true}}": "qos.tiers: "
    "expected shares that sum to 1 at most, not 1.1",
    "qos.tiers={a: {share: 1.5, default: true}}": "qos.tiers.a.share: got 1.5, "
    "expected less than or equal to 1",
    "qos.tiers={a: {default: true}, b: {default: true}}": "qos: "
    "expected default: true in exactly one tier, not in a, b",
    "qos.tiers={a: {priority: 1}, b: {}}": "qos: "
    "expected default: true in exactly one tier, not in none",
    "qos.tiers={a: {match: [x], default: true}, b: {match: [x]}}": "qos: "
    "expected match: each value in one tier only",
    "qos.tiers={a: {match: [b], default: true}, b: {}}": "qos: "
    "expected match: each value in one tier only",
    "qos.tiers={a: {shar: 0.5, default: true}}": "qos.tiers.a.shar: unknown key, "
    "did you mean share?",
    "qos.tiers={Gold!: {default: true}}": 'qos.tiers.Gold!.[key]: got "Gold!", '
    "expected a-z, 0-9 and inner dashes",
    "qos.tiers={a: {ttft: 200, default: true}}": "qos.tiers.a.ttft: got 200, "
    'expected a duration with its unit (ms, s, m, h), such as "30s"',
    "qos.header=X-Tier": 'qos.header: got "X-Tier", expected the name of a header in lower case',
    "qos.header='x tier:'": 'qos.header: got "x tier:", '
    "expected the name of a header in lower case",
    "qos.header=authorization": 'qos.header: got "authorization", '
    "expected another header: that one has a meaning of its own",
    "qos.ladder.stricter=0": "qos.ladder.stricter: got 0, expected greater than 0",
    "qos.ladder.missed=0": "qos.ladder.missed: got 0, expected greater than 0",
    "qos.ladder.tail=0.5": "qos.ladder.tail: got 0.5, expected greater than or equal to 1",
    "simulation.noise={sigma: 0.1, recorded: x}": "simulation.noise: expected either sigma or "
    "recorded",
    "workers=[{replicas: 2}]": "workers.0.role: missing, it is required",
    "workers.0.takes={min_prompt_tokens: 0}": "workers.0.takes.min_prompt_tokens: got 0, "
    "expected greater than or equal to 1",
    "workers.0.takes={min_prompt_tokens: 9, max_prompt_tokens: 8}": "workers.0.takes: "
    "expected max_prompt_tokens: 9 or more, which is min_prompt_tokens",
    "workers.0.takes={priority: 8}": "workers.0.takes.priority: unknown key, "
    "expected one of max_prompt_tokens, min_prompt_tokens, tiers",
    "workers.1.takes={min_prompt_tokens: 9}": "workers.1.takes: "
    "expected no rule for a pool of role decode: it gets prompts that are computed",
    "workers.0.takes={tiers: [gold]}": "the cluster file: "
    "expected takes.tiers of workers: default, and not gold",
    "workers.0.takes={min_prompt_tokens: 5000}": "the cluster file: "
    "expected a pool of workers that takes prompts of 1 to 4999 tokens of tier default",
}


@pytest.mark.parametrize(("given", "message"), REFUSED.items())
def test_refused_in_one_line_that_names_the_key(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        set_(given)
    assert str(error.value) == message


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_words_that_yaml_takes_for_booleans_are_words(mode: str) -> None:
    assert set_(f"engine.launch_ahead={mode}").engine.launch_ahead == mode


@pytest.mark.parametrize("key", ["compile", "profile", "cuda_graphs"])
def test_off_is_a_word_too(key: str) -> None:
    assert getattr(set_(f"engine.{key}=off").engine, key) == "off"


@pytest.mark.parametrize("other", ["codec=int8", "allow_mixed_precision=true", "handoff=pool"])
def test_a_canary_has_its_place_in_every_handoff(other: str) -> None:
    set_("transfer.canary_every=16", "pool.enabled=on", f"transfer.{other}")


def test_counts_further_errors() -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)$"):
        set_("nam=1", "engin=2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("name", "--set name: expected path.to.key=value"),
        ("workers.2.role=both", "--set workers.2: expected an index below 2"),
        ("workers.first.role=both", "--set workers.first: expected an index below 2"),
        ("workers.0.role.x=1", "--set workers.0.role.x: workers.0.role has no keys below it"),
        ("name=[", "--set name, line 1: not valid YAML: "),
    ],
)
def test_set_that_leads_nowhere(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        set_(given)
    assert str(error.value).startswith(message)


def test_set_makes_sections_and_reaches_lists() -> None:
    config = set_("workers.1.replicas=3", "workers.0.resources.mine=0.5", "engine.kv_memory=1MiB")
    assert config.workers[1].replicas == Replicas(min=3, max=3)
    assert config.workers[0].resources == {"mine": 0.5}
    assert config.engine.kv_memory == 2**20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "{path}, line 1: not valid YAML: "),
        ("name: a\nname: b\n", "{path}, line 2: not valid YAML: the key name is given twice"),
        ("- 1\n", "{path}: got a list of 1, expected a mapping of keys"),
        ("engine:\n  block_sizes: 3\n", "{path}: engine.block_sizes: unknown key, did you mean"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(message.format(path=path))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: can't read it: No such file"):
        load_config(tmp_path / "none.yaml")


def test_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("# nothing\n")
    assert load_config(path) == Config()


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().name = "other"  # type: ignore[misc]


def test_what_show_prints_reads_back_the_same(tmp_path: Path) -> None:
    resolved = resolve(set_("drain_timeout=1500ms", "router.max_body=3000B"), SITE)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(resolved.model_dump(mode="json")))
    assert load_config(path) == resolved
    assert resolve(resolved, SITE) == resolved


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_examples_load_and_resolve(name: str) -> None:
    plan = plan_cluster(resolve(load_config(CONFIGS / name), SITE))
    assert plan.workers


def test_examples_are_there() -> None:
    assert {"local.yaml", "one-gpu.yaml", "8-gpu.yaml", "qos.yaml"} <= {
        p.name for p in CONFIGS.iterdir()
    }


def test_cpus_are_shared_out() -> None:
    config = resolve(set_("workers.0.replicas=2"), SITE)
    assert [pool.cpu_threads for pool in config.workers] == [2, 2]
    assert [pool.resources for pool in config.workers] == [{"CPU": 2.0}, {"CPU": 2.0}]


def test_explicit_threads_leave_less_for_the_others() -> None:
    config = resolve(set_("workers.0.cpu_threads=6"), SITE)
    assert [pool.cpu_threads for pool in config.workers] == [6, 2]


def test_the_ranks_of_a_worker_have_a_share_each() -> None:
    config = resolve(set_("workers.0.parallel.tensor=3"), SITE)
    assert [pool.cpu_threads for pool in config.workers] == [6, 2]
    assert [pool.resources for pool in config.workers] == [{"CPU": 6.0}, {"CPU": 2.0}]
    plan = plan_cluster(resolve(config, SITE))
    assert [worker.settings.threads_per_rank for worker in plan.workers] == [2, 2]


@pytest.mark.parametrize("gpus", [0, 8])
def test_the_stages_of_a_worker_have_a_share_each(gpus: int) -> None:
    site = replace(SITE, gpus=gpus)
    config = resolve(set_("workers.0.parallel={tensor: 2, pipeline: 2}"), site)
    assert config.workers[0].cpu_threads == 4
    assert config.workers[0].resources == {"CPU": 4.0} | ({"GPU": 4.0} if gpus else {})
    plan = plan_cluster(resolve(config, site))
    assert plan.workers[0].settings.threads_per_rank == 1


@pytest.mark.parametrize(
    ("device", "gpus", "chunk_tokens"),
    [
        ("cpu", 8, 512),
        ("auto", 0, 512),
        ("auto", 8, 2048),
        ("cuda", 8, 2048),
        ("cuda:1", 8, 2048),
    ],
)
def test_a_chunk_is_larger_on_a_gpu(device: str, gpus: int, chunk_tokens: int) -> None:
    """Of each pool by itself: the other one runs on a CPU."""
    pools = f"workers=[{{role: prefill, device: '{device}'}}, {{role: decode, device: cpu}}]"
    site = replace(SITE, gpus=gpus)
    first, other = plan_cluster(resolve(set_(pools), site)).workers
    assert first.settings.prefill_chunk_tokens == chunk_tokens
    assert other.settings.prefill_chunk_tokens == 512
    given = resolve(set_(pools, "scheduler.prefill_chunk_tokens=64"), site)
    assert [one.settings.prefill_chunk_tokens for one in plan_cluster(given).workers] == [64, 64]


def test_each_rank_has_a_gpu() -> None:
    config = resolve(set_("workers.0={role: prefill, device: cuda, parallel: {tensor: 4}}"), SITE)
    assert config.workers[0].resources["GPU"] == 4
    plan = plan_cluster(resolve(config, SITE))
    assert [worker.placement.gpus for worker in plan.workers] == [4, 0]
    assert plan.workers[0].settings.device_share == 1


def test_more_ranks_than_cpus_still_fit() -> None:
    small = Site(total_cpus=2, node_cpus=2, host=None, bundled_path="/b")
    config = resolve(set_("workers.0.parallel.tensor=2"), small)
    assert [pool.cpu_threads for pool in config.workers] == [2, 1]
    assert sum(pool.resources["CPU"] for pool in config.workers) <= 2


def test_more_workers_than_cpus_still_fit() -> None:
    small = Site(total_cpus=1, node_cpus=1, host=None, bundled_path="/b")
    config = resolve(set_(), small)
    assert [pool.cpu_threads for pool in config.workers] == [1, 1]
    assert sum(pool.resources["CPU"] for pool in config.workers) <= 1


@pytest.mark.parametrize(
    ("given", "pinning"),
    [
        ([], ["auto", "auto"]),
        (["workers.0.cpu_threads=7"], ["auto", "auto"]),
        (["workers.0.cpu_threads=8"], ["off", "off"]),
        (["workers.0.cpu_threads=8", "workers.1.cpu_pinning=off"], ["auto", "off"]),
        (["workers.0.cpu_threads=8", "workers.1.device=cuda"], ["auto", "auto"]),
        (["workers.0.replicas=9"], ["off", "off"]),
    ],
)
def test_workers_are_pinned_where_each_can_have_its_own_cpus(
    given: list[str], pinning: list[str]
) -> None:
    config = resolve(set_(*given), SITE)
    assert [pool.cpu_pinning for pool in config.workers] == pinning
    settings = [worker.settings for worker in plan_cluster(config).workers]
    assert {one.cpu_pinning for one in settings} == {*pinning}


def test_two_roles_share_one_gpu() -> None:
    plan = plan_cluster(resolve(load_config(CONFIGS / "one-gpu.yaml"), SITE))
    for worker in plan.workers:
        assert worker.settings.device == "cuda:0"
        assert worker.settings.device_share == 2
        assert worker.placement == RayResources(cpus=1.0, gpus=0.5, machine_devices=True)


def test_eight_gpus_are_eight_workers() -> None:
    plan = plan_cluster(resolve(load_config(CONFIGS / "8-gpu.yaml"), SITE))
    assert sum(worker.placement.gpus for worker in plan.workers) == 8
    assert {worker.settings.device_share for worker in plan.workers} == {1}


AUTO_POOLS: dict[str, tuple[list[str], float, list[float]]] = {
    "no GPU: all on the CPU": ([], 0, [0, 0]),
    "one for each": ([], 8, [1, 1]),
    "one for two": ([], 1, [0.5, 0.5]),
    "two for three": (["workers.0.replicas=2"], 2, [0.5, 0.5, 0.5]),
    "one for three": (["workers.0.replicas=2"], 1, [0.3333] * 3),
    "one for each rank": (["workers.0.parallel.tensor=2"], 4, [2, 1]),
    "too few for the ranks": (["workers.0.parallel.tensor=2"], 2, [0, 0]),
    "others have taken some": (["workers.0.device=cuda"], 2, [1, 1]),
    "others have taken all": (["workers.0.device=cuda"], 1, [1, 0]),
    "a numbered one": (["workers.0.device=cuda:0"], 2, [1, 1]),
    "as its resources say": (["workers.0.resources={GPU: 0.25}"], 0, [0.25, 0]),
}


@pytest.mark.parametrize(("given", "gpus", "parts"), AUTO_POOLS.values(), ids=AUTO_POOLS)
def test_device_auto_takes_the_gpus_that_are_free(
    given: list[str], gpus: float, parts: list[float]
) -> None:
    config = resolve(set_(*given), replace(SITE, gpus=gpus))
    assert resolve(config, replace(SITE, gpus=gpus)) == config
    workers = plan_cluster(config).workers
    assert [worker.placement.gpus for worker in workers] == parts
    assert [worker.settings.gpus for worker in workers] == parts
    on_cpu = [part == 0 for part in parts]
    shares = [
        sum(on_cpu) if here else round(1 / part) if part < 1 else 1
        for here, part in zip(on_cpu, parts, strict=True)
    ]
    assert [worker.settings.device_share for worker in workers] == shares
    threads = {worker.settings.cpu_threads for worker in workers if worker.settings.gpus}
    assert threads <= {1, 2}, "of a worker on a GPU the CPU has little to do"


def test_workers_are_named_after_their_pool() -> None:
    pools = (
        "workers=[{role: both, replicas: 2}, {name: fast, role: both, device: cuda}, {role: both}]"
    )
    plan = plan_cluster(resolve(set_(pools), SITE))
    assert [w.settings.name for w in plan.workers] == ["both-0", "both-1", "fast-0", "both2-0"]
    assert [w.settings.device_share for w in plan.workers] == [3, 3, 1, 3]


def test_placement_splits_known_and_custom_resources() -> None:
    config = set_(
        "workers.0.resources={CPU: 3, memory: 1000000000, mine: 1}",
        "workers.0.accelerator_type=H100",
    )
    plan = plan_cluster(resolve(config, SITE))
    assert plan.workers[0].placement == RayResources(
        cpus=3.0, memory_bytes=1e9, accelerator_type="H100", custom=(("mine", 1.0),)
    )


def test_model_and_network_defaults() -> None:
    bundled = plan_cluster(resolve(set_(), SITE))
    assert bundled.routers[0].settings.served_model_name == "kvrelay-tiny"
    assert bundled.workers[0].settings.model == "/bundled/checkpoint"
    on_ray = Site(total_cpus=8, node_cpus=8, host=None, bundled_path="/b")
    named = plan_cluster(resolve(set_("model.path=/models/some-llama"), on_ray))
    assert named.routers[0].settings.served_model_name == "some-llama"
    assert named.workers[0].settings.host == NODE_HOST
    hub = plan_cluster(resolve(set_("model.path=org/some-llama"), SITE))
    assert hub.routers[0].settings.served_model_name == "org/some-llama"


def routers_of(*texts: str) -> list[tuple[str, int, int, str | None]]:
    plans = plan_cluster(resolve(set_("router.record=/logs/r.jsonl", *texts), SITE)).routers
    return [
        (one.settings.process, one.settings.http_port, one.settings.grpc_port, one.settings.record)
        for one in plans
    ]


def test_each_router_has_ports_and_a_record_of_its_own() -> None:
    assert routers_of() == [("router-0", 8000, 50051, "/logs/r.jsonl")]
    assert routers_of("router.replicas=2", "router.grpc_port=0") == [
        ("router-0", 8000, 0, "/logs/r-0.jsonl"),
        ("router-1", 8001, 0, "/logs/r-1.jsonl"),
    ]
    on_hosts_of_their_own = routers_of("router.replicas=2", "router.same_ports=true")
    assert [one[:3] for one in on_hosts_of_their_own] == [
        ("router-0", 8000, 50051),
        ("router-1", 8000, 50051),
    ]


def internal_of(site: Site, *texts: str) -> list[tuple[str, int, int]]:
    plans = plan_cluster(resolve(set_(*texts), site)).routers
    settings = [one.settings for one in plans]
    return [(s.internal_host, s.internal_http_port, s.internal_grpc_port) for s in settings]


def test_internal_ports_are_above_the_public_ones() -> None:
    assert internal_of(SITE) == [("127.0.0.1", 8900, 50951)]
    assert internal_of(SITE, "router.http_port=0") == [("127.0.0.1", 0, 50951)]
    assert internal_of(SITE, "router={replicas: 2, internal_http_port: 9000}") == [
        ("127.0.0.1", 9000, 50951),
        ("127.0.0.1", 9001, 50952),
    ]
    assert internal_of(SITE, "router={http_port: 65000, replicas: 2}")[0][1] == 0, "no room"


def test_the_internal_listener_is_on_loopback_unless_the_cluster_spans_hosts() -> None:
    several = Site(total_cpus=8, node_cpus=8, host=None, bundled_path="/b", spans_hosts=True)
    one_node = Site(total_cpus=8, node_cpus=8, host=None, bundled_path="/b")
    assert internal_of(several)[0][0] == NODE_HOST
    assert internal_of(one_node)[0][0] == "127.0.0.1"
    assert internal_of(one_node, "router.internal_host=node")[0][0] == NODE_HOST
    assert internal_of(several, "router.internal_host=10.0.0.5")[0][0] == "10.0.0.5"


@pytest.mark.parametrize(
    ("policy", "enabled", "stands"),
    [
        ("predictive", "auto", True),
        ("queue_limit", "auto", True),
        ("none", "auto", False),
        ("none", "true", True),
        ("predictive", "false", False),
    ],
)
def test_the_ladder_is_a_choice_of_its_own(policy: str, enabled: str, stands: bool) -> None:
    tiers = "qos.tiers={only: {ttft: 1s, default: true}}"
    texts = (f"router.admission.policy={policy}", f"qos.ladder.enabled={enabled}", tiers)
    settings = router_settings(resolve(set_(*texts), SITE))
    assert (settings.qos.ladder is not None) is stands
    assert [tier.name for tier in settings.qos.tiers] == ["only"]


def test_port_ranges_may_be_neighbours() -> None:
    set_("router={http_port: 8000, grpc_port: 8003, replicas: 3}")
    set_("router={http_port: 65533, grpc_port: 65530, replicas: 3}")
    set_("router={http_port: 0, grpc_port: 0, replicas: 3}")


def test_each_router_asks_for_its_resources() -> None:
    plan = plan_cluster(resolve(set_("router={replicas: 3, resources: {CPU: 3}}"), SITE))
    assert shortage(plan, {"CPU": 16.0}) == "the cluster asks for CPU: 17 and this machine has 16"


def test_workers_of_two_dtypes_need_permission() -> None:
    with pytest.raises(ConfigError, match=r"mixed_precision: true for workers of bf.* and fl"):
        set_("workers.0.dtype=float32", "workers.1.dtype=bfloat16")
    set_("workers.0.dtype=float32")  # whether the checkpoint's own differs only a worker can tell


def test_a_pools_transports_are_those_between_hosts_unless_they_are_named() -> None:
    def transports(*options: str) -> tuple[str, ...] | None:
        plan = plan_cluster(resolve(set_("pool.enabled=on", *options), SITE))
        assert plan.pool is not None
        return plan.pool.settings.transports

    some = "transfer.transports=[shm, ucx, cuda_ipc, nixl]"
    assert transports() is None, "left to the node"
    assert transports("transfer.transports=[shm]") == ()
    assert transports(some) == ("ucx", "nixl")
    assert transports(some, "pool.transports=[nixl]") == ("nixl",)
    assert transports(some, "pool.transports=[]") == ()


def test_pool_dtype_overrides_the_model() -> None:
    mixed = "transfer.allow_mixed_precision=true"
    config = set_("model.dtype=float16", "workers.0.dtype=float32", mixed)
    plan = plan_cluster(resolve(config, SITE))
    assert [worker.settings.dtype for worker in plan.workers] == ["float32", "float16"]


def test_a_pool_may_compute_prompts_in_fp8_for_pools_that_do_not() -> None:
    def products(*options: str) -> list[bool]:
        plan = plan_cluster(resolve(set_(*options), SITE))
        assert [worker.settings.role for worker in plan.workers] == [Role.PREFILL, Role.DECODE]
        assert not any(worker.settings.allow_mixed_precision for worker in plan.workers)
        return [worker.settings.cuda.fp8_products for worker in plan.workers]

    assert products("workers.0.quantization=fp8") == [True, False]
    assert products("model.quantization=fp8", "workers.1.quantization=none") == [True, False]


CHANGES = {
    "name": "other",
    "model.path": "/m",
    "model.revision": "v2",
    "model.served_name": "s",
    "model.dtype": "float16",
    "model.quantization": "fp8",
    "model.max_model_len": 77,
    "model.tool_format": "hermes",
    "model.reasoning_format": "none",
    "engine.block_size": 64,
    "engine.memory_fraction": 0.5,
    "engine.kv_memory": "3MiB",
    "preload": [{"system": "You are kind.", "tenant": "a"}],
    "engine.prefix_caching": False,
    "engine.eviction": "reuse",
    "engine.compile": "off",
    "engine.profile": "off",
    "engine.rank_timeout": "3s",
    "engine.cuda_graphs": "off",
    "engine.launch_ahead": "on",
    "engine.kv_dtype": "fp8",
    "engine.matmul_precision": "high",
    "attention.backend": "triton",
    "scheduler.prefill_chunk_tokens": 33,
    "scheduler.mixed_chunk_tokens": 34,
    "scheduler.max_running_requests": 5,
    "workers.0.name": "others",
    "workers.0.role": "decode",
    "workers.0.replicas": 2,
    "workers.0.device": "cuda",
    "workers.0.resources": {"x": 1},
    "workers.0.accelerator_type": "A100",
    "workers.0.cpu_threads": 3,
    "workers.0.parallel.tensor": 2,
    "workers.0.parallel.pipeline": 2,
    "workers.0.cpu_pinning": "off",
    "workers.0.dtype": "float32",
    "workers.0.quantization": "fp8",
    "workers.0.takes.min_prompt_tokens": 50,
    "workers.0.takes.max_prompt_tokens": 60,
    "workers.0.takes.tiers": ["default"],
    "router.host": "0.0.0.0",
    "router.replicas": 3,
    "router.http_port": 1,
    "router.grpc_port": 2,
    "router.internal_host": "node",
    "router.open_metrics": True,
    "router.internal_http_port": 3,
    "router.internal_grpc_port": 4,
    "router.public_metrics": True,
    "router.api_keys": "/keys",
    "router.api_key_hashes": ["0" * 64],
    "router.max_body": "5MiB",
    "router.record": "/log",
    "router.record_size": "5MiB",
    "router.directory_memory": "5MiB",
    "router.conversations.answers": 5,
    "router.conversations.memory": "5MiB",
    "router.conversations.age": "9s",
    "router.failover_patience": "9s",
    "router.lame_duck": "9s",
    "router.placement.policy": "random",
    "router.placement.local_prefill": "auto",
    "router.placement.move_hot_spots": True,
    "router.dispatch": "shared_queue",
    "router.admission.policy": "none",
    "router.admission.queue_limit": 3,
    "router.resources": {"y": 1},
    "qos.header": "x-plan",
    "qos.ladder.enabled": False,
    "qos.ladder.window": "9s",
    "qos.ladder.hold": "9s",
    "qos.ladder.calm": "9s",
    "qos.ladder.stricter": 0.5,
    "qos.ladder.missed": 0.05,
    "qos.ladder.tail": 3.0,
    "qos.tiers": {"only": {"default": True}},
    "qos.tenant_weights": {"a": 2.0},
    "transfer.transports": ["nixl"],
    "transfer.handoff": "pull",
    "transfer.codec": "int8",
    "transfer.allow_mixed_precision": True,
    "transfer.staging_slabs": 9,
    "transfer.staging_bytes": "9MiB",
    "transfer.require": ["rdma"],
    "transfer.ucx.tls": "tcp",
    "transfer.ucx.net_devices": "eth0",
    "transfer.ucx.rndv_threshold_bytes": "8KiB",
    "transfer.ucx.max_eager_rails": 2,
    "transfer.canary_every": 9,
    "transfer.lease_ttl": "9s",
    "pool.enabled": "auto",
    "pool.host_memory": "3MiB",
    "pool.disk": "/disk",
    "pool.disk_size": "4MiB",
    "pool.policy": "reuse",
    "pool.transports": ["nixl"],
    "pool.resources": {"z": 1},
    "network.host": "10.0.0.1",
    "network.port_range": [3000, 4000],
    "network.token_file": "t",
    "network.key_file": "k",
    "network.tls.public": {"certificate": "c", "key": "k"},
    "network.tls.internal": {"ca": "a", "certificate": "c", "key": "k"},
    "failure.detect": "9s",
    "observability.trace_dir": "/traces",
    "ray.startup_timeout": "9s",
    "ray.hang_timeout": "9s",
    "drain_timeout": "9s",
}
USED_WITH_ROLES = {
    f"elastic.{key}"
    for key in (
        "least_prefill",
        "least_decode",
        "gain",
        "dwell",
        "window",
        "cooldown",
        "start_up",
    )
}
USED_BY_SEVERAL_ROUTERS = {"router.same_ports"}
USED_BEFORE_THE_PLAN = {"ray.address"}
NAMED_BY_USERS = {"resources", "tiers", "tenant_weights"}


EVERYTHING = (
    Override(
        ("workers",), [{"name": "all", "role": "both"}, {"role": "prefill"}, {"role": "decode"}]
    ),
    Override(("pool", "enabled"), "on"),
)


def planned(config: Config) -> ClusterPlan:
    """Another file of secrets has other contents."""
    files = config.network
    secrets = Secrets(token=str(files.token_file).encode(), key=str(files.key_file).encode())
    return plan_cluster(resolve(config, SITE), secrets, given=config)


@pytest.mark.parametrize(("key", "value"), CHANGES.items())
def test_every_key_changes_the_plan(key: str, value: object) -> None:
    changed = load_config(None, [*EVERYTHING, Override(tuple(key.split(".")), value)])
    default = load_config(None, EVERYTHING)
    assert planned(changed) != planned(default)


@pytest.mark.parametrize("key", sorted(USED_WITH_ROLES))
def test_how_roles_follow_the_work_is_planned(key: str) -> None:
    auto = [*EVERYTHING, Override(("workers", "1", "role"), "auto")]
    value = 1 if "gain" in key else 7 if "least" in key else "9s"
    changed = load_config(None, [*auto, Override(tuple(key.split(".")), value)])
    assert planned(changed).elastic != planned(load_config(None, auto)).elastic


REPLACE_NOBODY = (
    *("workers.0.replicas", "workers.0.name", "workers.0.role", "router.replicas"),
    *("network.token_file", "network.key_file"),
)


@pytest.mark.parametrize(("key", "value"), CHANGES.items())
def test_who_gets_other_settings_is_replaced(key: str, value: object) -> None:
    """Not those whose share of the machine changes, because there are others beside them."""
    changed, default = (
        planned(load_config(None, [*EVERYTHING, *more]))
        for more in ([Override(tuple(key.split(".")), value)], [])
    )
    pools = zip(changed.worker_pools, default.worker_pools, strict=True)
    assert changed.pool is not None and default.pool is not None
    nodes = (changed.pool, default.pool)
    pairs: list[Any] = [*pools, (changed.routers[0], default.routers[0]), nodes]
    first = pairs[0]
    for now, before in pairs:
        is_other = (now.settings, now.placement) != (before.settings, before.placement)
        is_of_first = key.startswith("workers.0.") and (now, before) != first
        is_replaced = now.revision != before.revision
        assert is_replaced == (is_other and not is_of_first and key not in REPLACE_NOBODY), key


def test_no_key_is_missing_from_the_test_above() -> None:
    known = {*CHANGES, *USED_BY_SEVERAL_ROUTERS, *USED_BEFORE_THE_PLAN, *USED_WITH_ROLES}
    dumped = Config().model_dump(mode="json", exclude={"simulation"})
    dumped["workers"] = {"0": dumped["workers"][0]}
    assert set(_paths(dumped)) == known


def _paths(tree: dict[str, object], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict) and key not in NAMED_BY_USERS:
            found += _paths(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}")
    return found


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("500ms", 0.5), ("1.5m", 90), ("2h", 7200)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)
    assert parse_duration_s(format_duration(seconds)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"), [("1B", 1), ("4MiB", 2**22), ("1.5GiB", 3 * 2**29), ("2GB", 2 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size
    assert parse_size_bytes(format_size(size)) == size


@pytest.mark.parametrize("given", ["30", "-1s", "s", "", "1 day", None, 30, True, ["1s"]])
def test_no_duration(given: object) -> None:
    with pytest.raises(ValueError, match="a duration with its unit"):
        parse_duration_s(given)
