"""`kvrelay apply`, `scale`, `drain` and `flip`: change a cluster that runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.types import Role

if TYPE_CHECKING:
    from cluster.config.schema import Config
    from cluster.on_ray.launch import Driver, Stopwatch
    from kvrelay.access.values import Access
    from kvrelay.v1.admin_pb2 import ChangeRequest

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
        from cluster.access.chosen import caller_access

        router = AtRouter(address, caller_access(wanted))
        _change_to(wanted, router, yes=yes)
        router.wait(no_wait=no_wait)
        return
    with _on_ray(wanted.ray.address) as say:
        from cluster.access.chosen import check_token
        from cluster.on_ray import launch

        if wanted.name in launch.running_clusters():
            cluster = _found(wanted.name, say)
            check_token(wanted, cluster.driver.door().access)
            _change_to(wanted, cluster, yes=yes)
        else:
            cluster = _started(wanted, say, no_wait=no_wait)
        cluster.wait(no_wait=no_wait)
        if follow:
            cluster.driver.follow()


def _change_to(wanted: Config, cluster: AtRouter | OnRay, *, yes: bool) -> None:
    """The controller plans for the machines that it knows."""
    file = wanted.model_dump_json(exclude_unset=True)
    _confirmed(cluster.change(apply={"config": file, "only_tell": True}), yes=yes)
    cluster.change(apply={"config": file})


def _started(wanted: Config, say: Stopwatch, *, no_wait: bool) -> OnRay:
    from cluster.on_ray import launch
    from cluster.on_ray.connect import Connected, site_of

    print(f"{wanted.name}: a new cluster", flush=True)
    here = Connected(own=False, site=site_of(own=False))
    driver = launch.start(wanted, here, detach=True, say=say)
    if not no_wait:
        print("\n".join(launch.welcome(driver.wait_ready())), flush=True)
    return OnRay(driver)


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
    with _cluster(address, name, ray_address, token_file, set_) as cluster:
        for pool, count in wanted:
            _print(cluster.change(scale={"pool": pool, "count": count}))
        cluster.wait(no_wait=no_wait)


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
    asked = {"name": process, "replace": not remove}
    with _cluster(address, name, ray_address, token_file, set_) as cluster:
        cluster.drain(asked, timeout, no_wait=no_wait)


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
    with _cluster(address, name, ray_address, token_file, set_) as cluster:
        cluster.change(flip={"name": worker, "role": role})
    print(f"{worker} is a {role} worker" if role is not Role.BOTH else f"{worker} does both")


# --- who is asked, always by Admin.Change ---------------------------------------------------------

Wish = Mapping[str, object]


def _asked(**wish: Any) -> ChangeRequest:
    """One field of its oneof."""
    from kvrelay.v1.admin_pb2 import ChangeRequest

    return ChangeRequest(**wish)


@dataclass(frozen=True, slots=True)
class AtRouter:
    """A router, which passes on what its controller decides."""

    address: str
    access: Access

    def change(self, **wish: Wish) -> tuple[str, ...]:
        """What changes, in words. Raises KvrelayError."""
        from cluster.process import admin

        return admin.change(_asked(**wish), self.address, self.access)

    def wait(self, *, no_wait: bool) -> None:
        from cluster.process import admin

        if not no_wait:
            admin.wait_settled(self.address, self.access, partial(print, flush=True))
            print("every process serves", flush=True)

    def drain(self, drain: Wish, drain_s: float, *, no_wait: bool) -> None:
        from cluster.process import admin

        asked = _asked(drain=drain, drain_s=drain_s)
        told = admin.drain(asked, self.address, self.access, wait=not no_wait)
        print("\n".join([*told, f"{drain['name']} {'leaves' if no_wait else 'has left'}"]))


@dataclass(frozen=True, slots=True)
class OnRay:
    """The controller itself, which Ray finds. It says what happens meanwhile."""

    driver: Driver

    def change(self, **wish: Wish) -> tuple[str, ...]:
        """What changes, in words. Raises KvrelayError."""
        from cluster.process import admin

        door = self.driver.door()
        try:
            return admin.change(_asked(**wish), door.address, door.access)
        except ConfigError:
            raise KvrelayError(
                "the controller has not answered, and may still do it: see kvrelay status, and ask "
                "again"
            ) from None

    def wait(self, *, no_wait: bool) -> None:
        if not no_wait:
            self.driver.wait_settled()
            print(f"every process of {self.driver.name} serves", flush=True)

    def drain(self, drain: Wish, _: float, *, no_wait: bool) -> None:
        _print(self.change(drain=drain))
        self.wait(no_wait=no_wait)


@contextmanager
def _cluster(
    address: str | None,
    name: str | None,
    ray_address: str | None,
    token_file: str | None,
    set_: list[str] | None,
) -> Iterator[AtRouter | OnRay]:
    if address is not None:
        yield AtRouter(address, caller(name, token_file, set_))
        return
    with _on_ray(ray_address) as say:
        yield _found(name, say)


@contextmanager
def _on_ray(address: str | None) -> Iterator[Stopwatch]:
    """A connection to a Ray that runs."""
    from cluster.on_ray.connect import joined
    from cluster.on_ray.connect import ray_address as ray_to_join

    began_s = time.monotonic()
    with joined(ray_to_join(address) or "auto"):
        from cluster.on_ray import launch

        yield launch.Stopwatch(began_s)


def _found(name: str | None, say: Stopwatch) -> OnRay:
    """What happens from now on. Raises ConfigError when `name` fits none, or several clusters."""
    from cluster.on_ray import launch

    driver = launch.running(name, say=say)
    driver.skip_notes()
    return OnRay(driver)


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
