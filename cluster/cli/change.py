"""`kvrelay apply`, `scale`, `drain` and `flip`: change a cluster that runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.options import (
    NameOption,
    RayAddress,
    SetOption,
    TokenFile,
    caller,
    given,
    parsed,
)
from kvrelay.errors import ConfigError
from kvrelay.types import Role

if TYPE_CHECKING:
    from cluster.config.schema import Config
    from cluster.core.plan import ClusterPlan
    from cluster.on_ray.launch import Driver, Stopwatch
    from kvrelay.access.values import Access

MOST_DIGITS = 9
Router = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="A router's internal gRPC address: needs no Ray here.",
    ),
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Return at once; the cluster goes on by itself.")
]


def apply(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", envvar="KVRELAY_CONFIG", help="The cluster file (YAML)."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    no_wait: NoWait = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Show what happens until the cluster stops. Its end stops nothing."
        ),
    ] = False,
    address: Router = None,
    name: NameOption = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Make a cluster what its file says: start it detached, or change the one that runs.

    Shows what changes, and asks. Pools grow and shrink; workers and routers with other settings are
    replaced one by one, and no request fails. With --address: a cluster that runs.
    """
    from cluster.config.load import load_config
    from cluster.process.site import located

    overrides = given(name=name, network__token_file=token_file, ray__address=ray_address)
    wanted = located(load_config(config, overrides + parsed(set_)))
    if address is not None:
        if follow:
            raise ConfigError("--follow is for a command that joins Ray: kvrelay top follows too")
        _apply_at(address, wanted, yes=yes, no_wait=no_wait)
        return
    with _on_ray(wanted.ray.address) as say:
        from cluster.on_ray import launch
        from cluster.on_ray.connect import Connected, site_of

        if wanted.name in launch.running_clusters():
            driver = _changed(wanted, say, yes=yes)
        else:
            print(f"{wanted.name}: a new cluster", flush=True)
            here = Connected(own=False, site=site_of(own=False))
            driver = launch.start(wanted, here, detach=True, say=say)
            if not no_wait:
                print("\n".join(launch.welcome(driver.wait_ready())), flush=True)
        _wait(driver, no_wait=no_wait)
        if follow:
            driver.follow()


def _apply_at(address: str, wanted: Config, *, yes: bool, no_wait: bool) -> None:
    """The controller plans for the machines that it knows."""
    from cluster.access.chosen import caller_access

    access, file = caller_access(wanted), wanted.model_dump_json(exclude_unset=True)

    def ask(*, only_tell: bool) -> tuple[str, ...]:
        return _at(address, access, apply={"config": file, "only_tell": only_tell})

    _confirmed(ask(only_tell=True), yes=yes)
    ask(only_tell=False)
    _wait_at(address, access, no_wait=no_wait)


def _changed(wanted: Config, say: Stopwatch, *, yes: bool) -> Driver:
    from cluster.on_ray.wishes import Apply

    driver = _found(wanted.name, say)
    plan = _plan_of(wanted, own=driver.is_own())
    _confirmed(driver.wish(Apply(plan, only_tell=True)), yes=yes)
    driver.wish(Apply(plan))
    return driver


def scale(
    pools: Annotated[
        list[str], typer.Argument(metavar="POOL=N...", help="The pool, and how many workers.")
    ],
    no_wait: NoWait = False,
    address: Router = None,
    name: NameOption = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Change the number of workers of a pool. The cluster file does not change."""
    wanted = [_pool_and_count(text) for text in pools]
    if address is not None:
        access = caller(name, token_file, set_)
        for pool, count in wanted:
            _print(_at(address, access, scale={"pool": pool, "count": count}))
        _wait_at(address, access, no_wait=no_wait)
        return
    with _on_ray(ray_address) as say:
        from cluster.on_ray.asked import Scale

        driver = _found(name, say)
        for pool, count in wanted:
            _print(driver.wish(Scale(pool, count)))
        _wait(driver, no_wait=no_wait)


def drain(
    process: Annotated[
        str, typer.Argument(metavar="WORKER", help="A worker or router, such as decode-1.")
    ],
    remove: Annotated[
        bool, typer.Option("--remove", help="Its pool has one worker fewer from now on.")
    ] = False,
    no_wait: NoWait = False,
    address: Router = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Without a controller: what no other worker takes within this time is cut.",
        ),
    ] = 30.0,
    name: NameOption = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Take a worker or router out of service; where a controller runs, another one replaces it.

    It gets nothing new, what it runs goes on elsewhere, and then it ends. Whoever started a worker
    as a process of its own starts another one.
    """
    if address is not None:
        from cluster.process import admin
        from kvrelay.v1.admin_pb2 import ChangeRequest

        asked = ChangeRequest(drain={"name": process, "replace": not remove}, drain_s=timeout)
        access = caller(name, token_file, set_)
        told = admin.drain(asked, address, access, wait=not no_wait)
        print("\n".join([*told, f"{process} {'leaves' if no_wait else 'has left'}"]))
        return
    with _on_ray(ray_address) as say:
        from cluster.on_ray.asked import Drain

        driver = _found(name, say)
        _print(driver.wish(Drain(name=process, replace=not remove)))
        _wait(driver, no_wait=no_wait)


def flip(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as decode-1.")],
    role: Annotated[Role, typer.Argument(help="What it is from now on.")],
    address: Router = None,
    name: NameOption = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Give a worker another role, at once: what it has already been sent is served.

    It keeps the role when it starts again, and one that replaces it gets it, until the file is
    applied. A worker that is a process of its own has it until it starts again.
    """
    if address is not None:
        _at(address, caller(name, token_file, set_), flip={"name": worker, "role": role})
    else:
        with _on_ray(ray_address) as say:
            from cluster.on_ray.asked import Flip

            _found(name, say).wish(Flip(worker, role))
    print(f"{worker} is a {role} worker" if role is not Role.BOTH else f"{worker} does both")


def _at(address: str, access: Access, **wish: dict[str, object]) -> tuple[str, ...]:
    """What changes; see `ChangeRequest`."""
    from cluster.process import admin
    from kvrelay.v1.admin_pb2 import ChangeRequest

    asked: Any = wish  # one field of a oneof
    return admin.change(ChangeRequest(**asked), address, access)


@contextmanager
def _on_ray(address: str | None) -> Iterator[Stopwatch]:
    """A connection to a Ray that runs."""
    from cluster.on_ray.connect import joined
    from cluster.on_ray.connect import ray_address as ray_to_join

    began_s = time.monotonic()
    with joined(ray_to_join(address) or "auto"):
        from cluster.on_ray import launch

        yield launch.Stopwatch(began_s)


def _found(name: str | None, say: Stopwatch) -> Driver:
    """What happens from now on. Raises ConfigError when `name` fits none, or several clusters."""
    from cluster.on_ray import launch

    driver = launch.running(name, say=say)
    driver.skip_notes()
    return driver


def _plan_of(config: Config, *, own: bool) -> ClusterPlan:
    from cluster.access.chosen import secrets_of
    from cluster.core.plan import plan_cluster
    from cluster.core.resolve import resolve
    from cluster.on_ray.connect import site_of

    resolved = resolve(config, site_of(own=own))
    return plan_cluster(resolved, secrets_of(resolved), given=config)


def _wait(driver: Driver, *, no_wait: bool) -> None:
    if not no_wait:
        driver.wait_settled()
        print(f"every process of {driver.name} serves", flush=True)


def _wait_at(address: str, access: Access, *, no_wait: bool) -> None:
    from cluster.process import admin

    if not no_wait:
        admin.wait_settled(address, access, partial(print, flush=True))
        print("every process serves", flush=True)


def _print(lines: tuple[str, ...]) -> None:
    print("\n".join(lines) if lines else "nothing changes")


def _confirmed(told: tuple[str, ...], *, yes: bool) -> None:
    """Raises ConfigError where nobody can answer."""
    _print(told)
    if not told or yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to say yes: give --yes")
    if not typer.confirm("apply?"):
        raise typer.Abort


def _pool_and_count(text: str) -> tuple[str, int]:
    pool, _, count = text.partition("=")
    if not pool or not count.isdecimal() or len(count) > MOST_DIGITS:
        raise ConfigError(f"{text}: expected POOL=N, such as decode=3")
    return pool, int(count)
