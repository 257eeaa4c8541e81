"""`kvrelay router`, `kvrelay worker` and `kvrelay pool-node`: single processes, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import (
    ApiKeys,
    GrpcPort,
    Host,
    HttpPort,
    ModelOption,
    NameOption,
    SetOption,
    TokenFile,
    given,
    key_hashes,
    only,
    parsed,
)
from cluster.config.keys import ELASTIC_KEYS, POOL_KEYS, ROUTER_KEYS, WORKER_KEYS
from kvrelay.errors import ConfigError
from kvrelay.types import Role


def router(
    model: ModelOption = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    api_key: ApiKeys = None,
    name: NameOption = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Run a router; workers join it with kvrelay worker --join."""
    overrides = given(
        name=name,
        model__path=model,
        router__host=host,
        router__http_port=http_port,
        router__grpc_port=grpc_port,
        network__token_file=token_file,
        router__api_key_hashes=key_hashes(api_key),
    )
    overrides += only(parsed(set_), ROUTER_KEYS)

    from cluster.access.chosen import secrets_of
    from cluster.config.load import load_config
    from cluster.core.plan import router_settings
    from cluster.core.resolve import resolve
    from cluster.process.logs import configure_logging
    from cluster.process.site import local_site

    config = resolve(load_config(None, overrides), local_site())
    _no_node(config.router.internal_host)
    configure_logging("router")
    import uvloop

    from cluster.cli.plain.run import run_router

    settings = router_settings(config, secrets_of(config))
    uvloop.run(run_router(settings, drain_s=config.drain_timeout))


def worker(
    join: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT",
            help="A router's internal gRPC address. dns:NAME:PORT: one at each of its addresses.",
        ),
    ],
    role: Annotated[Role, typer.Option(help="The role of this worker.")],
    device: Annotated[
        str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")
    ] = "auto",
    model: ModelOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the worker. Default: role and pid.")
    ] = None,
    worker_pool: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The pool of workers that it counts in. Default: its name up to the last -.",
        ),
    ] = None,
    cpu_threads: Annotated[
        int | None, typer.Option(help="Compute threads. Default: one per CPU.")
    ] = None,
    tensor: Annotated[int, typer.Option(min=1, help="Processes that share the model's heads.")] = 1,
    pipeline: Annotated[
        int, typer.Option(min=1, help="Stages that share its layers, on device cpu.")
    ] = 1,
    cpu_pinning: Annotated[
        str | None,
        typer.Option(metavar="auto|off", help="On device cpu: give the worker its own CPUs."),
    ] = None,
    device_share: Annotated[
        int, typer.Option(min=1, help="Number of workers that share this device.")
    ] = 1,
    pool: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Use this host's pool node of this name."),
    ] = None,
    takes: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Compute only such prompts where others can compute the rest: takes of a cluster "
            "file, such as '{min_prompt_tokens: 5000}'.",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file that is there while the worker serves: for a probe."
        ),
    ] = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Run one worker and join it to one or more routers."""
    import os

    overrides = [
        *given(model__path=model, pool__enabled="off"),
        *only(parsed(set_), WORKER_KEYS),
        *given(workers=[_pool(device, cpu_threads, cpu_pinning, tensor, pipeline)]),
        *given(name=pool, pool__enabled=None if pool is None else "on"),
        *given(network__token_file=token_file),
    ]

    from cluster.access.chosen import token_of
    from cluster.cli.plain.joins import own_host
    from cluster.config.load import load_config, read_rule
    from cluster.core.plan import access_of, worker_settings
    from cluster.core.resolve import resolve
    from cluster.process.host_cpus import give_way
    from cluster.process.logs import configure_logging
    from cluster.process.site import site_with_gpus

    loaded = load_config(None, overrides)
    site = replace(site_with_gpus(), host=own_host(loaded.network.host, join))
    config = resolve(loaded, site)
    process_name = name or f"{role}-{os.getpid()}"
    access = access_of(config, token_of(config))
    settings = worker_settings(config, config.workers[0], process_name, access)
    settings = replace(settings, role=role, device_share=device_share, gpus=None)
    settings = replace(settings, pool=worker_pool or settings.pool)
    if takes is not None:
        settings = replace(settings, takes=read_rule(takes, "--takes"))
    configure_logging(process_name)
    give_way(settings.device)
    from cluster.cli.plain.run import run_worker

    drain_s = config.drain_timeout
    asyncio.run(run_worker(settings, join=join, drain_s=drain_s, ready_file=ready_file))


def pool_node(
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Shared memory, such as 64GiB. Default: auto."),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="PATH", help="A folder that keeps KV over restarts.")
    ] = None,
    disk_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest size of the folder's contents.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Eviction policy: lru or reuse.")
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Serve workers of other hosts too: nixl or ucx."),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Internal gRPC address of a router that shall know its blocks, or dns:NAME:PORT.",
        ),
    ] = None,
    name: NameOption = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Run this host's pool node: it keeps KV in memory and on disk when workers are gone."""
    overrides = given(
        name=name,
        pool__host_memory=host_memory,
        pool__disk=disk,
        pool__disk_size=disk_size,
        pool__policy=policy,
        pool__transports=transport,
        network__token_file=token_file,
    )
    overrides += only(parsed(set_), POOL_KEYS)

    from cluster.access.chosen import token_of
    from cluster.cli.plain.joins import own_host
    from cluster.config.load import load_config
    from cluster.core.plan import access_of, pool_node_settings
    from cluster.core.resolve import resolve
    from cluster.process.logs import configure_logging
    from cluster.process.site import local_site

    loaded = load_config(None, overrides)
    site = local_site()
    if join:
        site = replace(site, host=own_host(loaded.network.host, join))
    config = resolve(loaded, site)
    configure_logging("pool-node")
    from cluster.cli.plain.run import run_pool_node

    settings = pool_node_settings(config, access_of(config, token_of(config)))
    asyncio.run(run_pool_node(settings, join=join or (), drain_s=config.drain_timeout))


def controller(
    join: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT",
            help="A router's internal gRPC address; name all. dns:NAME:PORT: one at each of "
            "its addresses.",
        ),
    ],
    token_file: TokenFile = None,
    name: NameOption = None,
    set_: SetOption = None,
) -> None:
    """Keep the roles of workers as the offered work asks. On Ray the cluster does it itself, for
    pools of role auto."""
    overrides = [
        *given(name=name, network__token_file=token_file),
        *only(parsed(set_), ELASTIC_KEYS),
    ]

    from cluster.access.chosen import token_of
    from cluster.config.load import load_config
    from cluster.core.elastic.of_file import role_rules
    from cluster.core.plan import access_of
    from cluster.process.logs import configure_logging
    from cluster.process.net import split_address

    for address in join:
        split_address(address.removeprefix("dns:"), "--join")
    config = load_config(None, overrides)
    configure_logging("controller")
    from cluster.cli.plain.run import run_controller

    run_controller(join, role_rules(config.elastic), access_of(config, token_of(config)))


def _no_node(internal_host: str | None) -> None:
    """Raises ConfigError."""
    if internal_host == "node":
        raise ConfigError("router.internal_host: node is for routers on Ray, give an address")


def _pool(
    device: str,
    cpu_threads: int | None,
    cpu_pinning: str | None,
    tensor: int,
    pipeline: int,
) -> dict[str, object]:
    """Role both stands in for the worker's own role, because a cluster file needs both sides."""
    pool: dict[str, object] = {
        "role": Role.BOTH,
        "device": device,
        "cpu_threads": cpu_threads,
        "parallel": {"tensor": tensor, "pipeline": pipeline},
    }
    return pool if cpu_pinning is None else pool | {"cpu_pinning": cpu_pinning}
