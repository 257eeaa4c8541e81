"""`kvrelay serve`, `demo`, `status` and `top`: whole clusters, on Ray."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import (
    ApiKeys,
    Format,
    FormatOption,
    GrpcPort,
    Host,
    HttpPort,
    ModelOption,
    NameOption,
    RayAddress,
    Served,
    SetOption,
    TokenFile,
    caller,
    devices,
    given,
    key_hashes,
    parsed,
    replicas,
    served,
)
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.access.values import Access


def serve(
    source: Served = None,
    model: ModelOption = None,
    device: Annotated[
        str | None, typer.Option(help="Device of all workers: auto (default), cpu, cuda or cuda:N.")
    ] = None,
    host: Host = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode workers.")] = None,
    name: NameOption = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    api_key: ApiKeys = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the cluster serves; it keeps running.")
    ] = False,
    set_: SetOption = None,
) -> None:
    """Start a cluster, and stop it with Ctrl-C.

    Without arguments: one router, one prefill and one decode worker on this machine, with the
    bundled model, on a Ray of their own. With RAY_ADDRESS or --ray-address: on that Ray.
    """
    began_s = time.monotonic()
    config, model = served(source, model)
    overrides = given(
        name=name,
        model__path=model,
        router__host=host,
        router__http_port=http_port,
        router__grpc_port=grpc_port,
        router__api_key_hashes=key_hashes(api_key),
        ray__address=ray_address,
        network__token_file=token_file,
    )
    overrides += devices(config, device)
    overrides += replicas(config, "prefill", prefill) + replicas(config, "decode", decode)

    from cluster.config.load import load_config
    from cluster.process.site import located

    loaded = located(load_config(config, overrides + parsed(set_)))
    from cluster.on_ray.connect import connected
    from cluster.on_ray.connect import ray_address as ray_to_join

    if ray_to_join(loaded.ray.address) is None:
        if detach:
            raise ConfigError("--detach needs a Ray that keeps running: give --ray-address")
        from cluster.process.checks import check_here

        check_here(loaded)
    with connected(loaded, log_to_driver=True) as here:
        from cluster.on_ray import launch

        say = launch.Stopwatch(began_s)
        say(f"Ray has started at {here.address}" if here.own else f"joined Ray at {here.address}")
        launch.serve(loaded, here, detach=detach, say=say)
    say("detached" if detach else "stopped, nothing is left")


def stop(name: NameOption = None, ray_address: RayAddress = None) -> None:
    """Drain a cluster that runs on Ray and remove it, such as one that was detached."""
    began_s = time.monotonic()
    from cluster.on_ray.connect import joined
    from cluster.on_ray.connect import ray_address as ray_to_join

    with joined(ray_to_join(ray_address) or "auto"):
        from cluster.on_ray import launch

        say = launch.Stopwatch(began_s)
        launch.stop(name, say=say)
        say("stopped, nothing is left")


def demo() -> None:
    """Start the default cluster, stream three answers, show where their time went, stop."""
    from cluster.cli.demo import run_demo

    run_demo()


def status(
    name: NameOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A router's internal gRPC address, for clusters without Ray."
        ),
    ] = None,
    ray_address: RayAddress = None,
    kv: Annotated[
        bool, typer.Option("--kv", help="Show who holds which KV, and since when.")
    ] = False,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --kv: only this tenant's KV.")
    ] = None,
    token_file: TokenFile = None,
    format_: FormatOption = Format.TABLE,
    set_: SetOption = None,
) -> None:
    """Show a running cluster: its processes, their state, their free KV blocks."""
    from cluster.cli.status import asked, tables
    from cluster.on_ray.connect import ray_address as ray_to_join

    ray = ray_to_join(ray_address) or "auto"
    if kv and address is not None:
        _kv_status([address], caller(name, token_file, set_), tenant, format_)
        return
    if kv:
        _kv_status(*asked.routers_of(name, ray), tenant, format_)
        return

    if address is not None:
        facts = asked.of_router(address, caller(name, token_file, set_))
    else:
        facts = asked.of_cluster(name, ray)
    if format_ is Format.JSON:
        print(asked.as_json(facts))
    else:
        tables.print_table(facts)


def _kv_status(routers: list[str], access: Access, tenant: str | None, format_: Format) -> None:
    from cluster.cli.status import kv
    from cluster.cli.status.asked import as_json

    found = kv.of_routers(routers, access)
    if format_ is Format.JSON:
        print(as_json(kv.as_facts(found)))
    else:
        kv.print_tables(found, tenant=tenant)


def top(
    name: NameOption = None,
    address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A router's internal gRPC address, once for each router: no Ray is asked.",
        ),
    ] = None,
    ray_address: RayAddress = None,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Between two reports."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one report, and end.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON; without --once a line for each report.")
    ] = False,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Watch a running cluster in the terminal: its workers, requests and links. Ctrl-C ends it."""
    from cluster.cli.status.asked import routers_of
    from cluster.cli.top.run import run_top
    from cluster.on_ray.connect import ray_address as ray_to_join

    if address:
        routers, access = address, caller(name, token_file, set_)
    else:
        routers, access = routers_of(name, ray_to_join(ray_address) or "auto")
    run_top(routers, access, interval, once=once, as_json=json_)
