"""`kvrelay apply`, `scale` and `drain`: change a cluster that runs on Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.options import NameOption, RayAddress, SetOption, TokenFile, given, parsed
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config.schema import Config
    from cluster.core.plan import ClusterPlan
    from cluster.on_ray.launch import Driver
    from cluster.on_ray.wishes import Wish

NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Return at once; the cluster goes on by itself.")
]


def apply(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The cluster file (YAML).")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    no_wait: NoWait = False,
    name: NameOption = None,
    ray_address: RayAddress = None,
    token_file: TokenFile = None,
    set_: SetOption = None,
) -> None:
    """Make a running cluster what its file says now.

    Shows what changes, and asks. Pools grow and shrink; workers and routers with other settings are
    replaced one by one, and no request fails.
    """
    from cluster.config.load import load_config
    from cluster.process.site import located

    overrides = given(name=name, network__token_file=token_file, ray__address=ray_address)
    wanted = located(load_config(config, overrides + parsed(set_)))
    with _running(wanted.name, wanted.ray.address) as driver:
        from cluster.on_ray.wishes import Apply

        plan = _plan_of(wanted, own=driver.is_own())
        told = driver.wish(Apply(plan, only_tell=True))
        _print(told)
        if told and not yes:
            _ask()
        _do(driver, Apply(plan), no_wait=no_wait)


def scale(
    pools: Annotated[
        list[str], typer.Argument(metavar="POOL=N...", help="The pool, and how many workers.")
    ],
    no_wait: NoWait = False,
    name: NameOption = None,
    ray_address: RayAddress = None,
) -> None:
    """Change the number of workers of a pool. The cluster file does not change."""
    wanted = [_pool_and_count(text) for text in pools]
    with _running(name, ray_address) as driver:
        from cluster.on_ray.wishes import Scale

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
    name: NameOption = None,
    ray_address: RayAddress = None,
) -> None:
    """Take a worker or router out of service; another one replaces it.

    It gets nothing new, what it runs goes on elsewhere, and then it ends.
    """
    with _running(name, ray_address) as driver:
        from cluster.on_ray.wishes import Drain

        _print(driver.wish(Drain(name=process, replace=not remove)))
        _wait(driver, no_wait=no_wait)


@contextmanager
def _running(name: str | None, ray_address: str | None) -> Iterator[Driver]:
    """The cluster's controller, from now on. Raises ConfigError when `name` fits none, or several
    clusters."""
    from cluster.on_ray.connect import joined
    from cluster.on_ray.connect import ray_address as ray_to_join

    began_s = time.monotonic()
    with joined(ray_to_join(ray_address) or "auto"):
        from cluster.on_ray import launch

        driver = launch.running(name, say=launch.Stopwatch(began_s))
        driver.skip_notes()
        yield driver


def _plan_of(config: Config, *, own: bool) -> ClusterPlan:
    from cluster.access.chosen import secrets_of
    from cluster.core.plan import plan_cluster
    from cluster.core.resolve import resolve
    from cluster.on_ray.connect import site_of

    resolved = resolve(config, site_of(own=own))
    return plan_cluster(resolved, secrets_of(resolved), given=config)


def _do(driver: Driver, wish: Wish, *, no_wait: bool) -> None:
    driver.wish(wish)
    _wait(driver, no_wait=no_wait)


def _wait(driver: Driver, *, no_wait: bool) -> None:
    if not no_wait:
        driver.wait_settled()
        print(f"every process of {driver.name} serves")


def _print(lines: tuple[str, ...]) -> None:
    print("\n".join(lines) if lines else "nothing changes")


def _ask() -> None:
    """Raises ConfigError where nobody can answer."""
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to say yes: give --yes")
    if not typer.confirm("apply?"):
        raise typer.Abort


def _pool_and_count(text: str) -> tuple[str, int]:
    pool, _, count = text.partition("=")
    if not pool or not count.isdecimal():
        raise ConfigError(f"{text}: expected POOL=N, such as decode=3")
    return pool, int(count)
