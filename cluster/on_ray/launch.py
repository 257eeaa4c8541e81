"""`kvrelay serve`: starts a cluster on Ray, follows it, and removes it at the end.

Runs in the driver. The cluster belongs to its controller actor. This process only starts the
controller, prints its notes, and asks it how the cluster is. When this process ends without a word,
the controller stops the cluster; when it is only silent, nothing happens.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.access.chosen import secrets_of
from cluster.config.schema import Config
from cluster.core.plan import ClusterPlan, plan_cluster, shortage
from cluster.core.resolve import pinned, resolve, squeezed
from cluster.core.supervision import Phase
from cluster.on_ray.connect import Connected
from cluster.on_ray.controller import Controller
from cluster.on_ray.door import DoorAt
from cluster.on_ray.driver import this_driver
from cluster.on_ray.fleet import CONTROLLER, NAMESPACE, SMALL, Handle, actor_name
from cluster.on_ray.record import (
    ClusterRecord,
    has_ended,
    new_key,
    put_record,
    remove_record,
    remove_records,
)
from cluster.on_ray.reports import ControllerReport
from cluster.process.bars import DownloadBars
from kvrelay.errors import ConfigError, KvrelayError

BEAT_S = 0.25
IDLE_BEAT_S = 3.0
ANSWER_S = 60.0
GONE_S = 60.0
CONTROLLER_CALLS_AT_ONCE = 64
ON_THE_HEAD = "node:__internal_head__"
"""What Ray gives to its head alone. The controller is there, since a node that has an actor is
never idle: the autoscaler would not remove it, and its drain would last to the end."""
ONE_PRESS_S = 0.3
"""A second Ctrl-C within this time counts as the first."""

Printer = Callable[[str], None]


@dataclass(slots=True)
class Stopwatch:
    """Prints progress with the seconds since the command began."""

    began_s: float

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:6.1f} s  {text}", flush=True)


class Driver:
    """One cluster, as a command that follows it sees it."""

    def __init__(
        self, name: str, controller: Handle, *, say: Printer, idle_beat_s: float = IDLE_BEAT_S
    ) -> None:
        self.name = name
        self._controller = controller
        self._idle_beat_s = idle_beat_s
        self._say = say
        self._controller_id = ""
        self._seen = 0
        self._bars = DownloadBars()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Asks the cluster to drain and stop. Safe in a signal handler and on any thread."""
        self._stopping.set()

    def wait_ready(self) -> ControllerReport:
        """Returns when all processes serve, or `stop` was called. Raises KvrelayError if the
        cluster can't start."""
        report = self._beat()
        while report.phase is Phase.STARTING and not self._stopping.is_set():
            self._stopping.wait(BEAT_S)
            report = self._beat()
        return report if report.phase is Phase.READY else self.follow()

    def wait_settled(self) -> ControllerReport:
        """Returns when every process is there as desired and serves, or `stop` was called. Raises
        KvrelayError if the cluster stops, or a process can't start or is refused by a router."""
        report = self.wait_ready()
        while report.phase is Phase.READY and not report.settled and not self._stopping.is_set():
            if report.troubles:
                raise KvrelayError("; ".join(report.troubles))
            self._stopping.wait(BEAT_S)
            report = self._beat()
        return report if report.phase is Phase.READY else self.follow()

    def skip_notes(self) -> None:
        """Says only what happens from now on."""
        report = self._ask()
        self._seen, self._controller_id = report.noted, report.controller

    def door(self) -> DoorAt:
        """Where the controller is asked to change the cluster. Raises KvrelayError."""
        try:
            found: DoorAt = ray.get(self._controller.door.remote(), timeout=ANSWER_S)
        except GetTimeoutError:
            raise KvrelayError(f"the controller has not answered for {ANSWER_S:g} s") from None
        except RayTaskError as error:
            raise KvrelayError(f"the controller can't be asked: {error.cause}") from None
        except RayError:
            raise KvrelayError(
                "the controller does not answer: the cluster stops, or has lost its controller"
            ) from None
        return found

    def follow(self) -> ControllerReport:
        """Sends heartbeats until the cluster has stopped. Raises KvrelayError if it stopped by
        itself."""
        report = self._beat()
        while report.phase is not Phase.STOPPED:
            self._pause(report.phase)
            report = self._next_report(report)
        _wait_gone(self.name)
        if report.error:
            raise KvrelayError(report.error)
        return report

    def _next_report(self, last: ControllerReport) -> ControllerReport:
        """A cluster that another command stops may be gone before it is asked again."""
        try:
            return self._beat()
        except KvrelayError:
            if not has_ended(self.name):
                raise
            return replace(last, phase=Phase.STOPPED)

    def _pause(self, phase: Phase) -> None:
        if phase is Phase.STOPPING:
            time.sleep(BEAT_S)
        else:
            self._stopping.wait(self._idle_beat_s)

    def _beat(self) -> ControllerReport:
        try:
            report = self._with_all_notes(self._ask())
        except RayError as error:
            raise KvrelayError(f"the controller is lost: {error}") from None
        for note in report.notes:
            self._say(note)
        self._bars.show(report.downloads)
        self._seen = report.noted
        return report

    def _with_all_notes(self, report: ControllerReport) -> ControllerReport:
        """A restarted controller begins its notes anew."""
        if report.controller == self._controller_id:
            return report
        self._controller_id = report.controller
        if not self._seen:
            return report
        self._seen = 0
        return self._ask()

    def _ask(self) -> ControllerReport:
        """The cluster goes on without its controller, so the answer is waited for; not when the
        cluster shall stop."""
        while True:
            beat = self._controller.heartbeat.remote(self._seen, self._stopping.is_set())
            try:
                report: ControllerReport = ray.get(beat, timeout=ANSWER_S)
            except GetTimeoutError:
                if self._stopping.is_set():
                    raise
                self._say(f"the controller has not answered for {ANSWER_S:g} s")
            else:
                return report


def start(config: Config, here: Connected, *, detach: bool, say: Printer) -> Driver:
    """Starts the controller; the cluster starts from then on. Raises ConfigError if it can't."""
    resolved = resolve(config, here.site)
    if pinned(config.workers) and not pinned(resolved.workers):
        say("workers aren't pinned: they have more threads than there are CPUs")
    if not here.own and (pools := squeezed(config.workers, here.site)):
        say(
            f"{', '.join(pools)}: one CPU thread for each worker, since Ray has "
            f"{here.site.total_cpus:g} CPUs at present: set workers.cpu_threads where more come"
        )
    plan = plan_cluster(resolved, secrets_of(resolved), given=config)
    if here.own and (missing := shortage(plan, ray.cluster_resources())):
        raise ConfigError(missing)
    controller = _create_controller(plan, detach=detach, own=here.own)
    return Driver(plan.name, controller, say=say)


def serve(config: Config, here: Connected, *, detach: bool, say: Stopwatch) -> None:
    """Returns when the cluster has stopped after a signal, or at once with `detach`."""
    driver = start(config, here, detach=detach, say=say)
    _on_signals(driver)
    try:
        report = driver.wait_ready()
        if report.phase is Phase.STOPPED:
            return
        for line in welcome(report):
            print(line, flush=True)
        if not detach:
            driver.follow()
    except KeyboardInterrupt:
        say("ending at once: running requests are cut")
        if not here.own:  # else it ends with its Ray
            kill(driver.name)
        raise


def _on_signals(driver: Driver) -> None:
    """The first signal drains; a Ctrl-C after it raises KeyboardInterrupt. One press can arrive
    twice: from the terminal, and from a parent that passes it on."""
    first_s: float | None = None

    def told(number: int, _: object) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        if first_s is None:
            first_s = now_s
            driver.stop()
        elif number == signal.SIGINT and now_s - first_s > ONE_PRESS_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)


def kill(cluster: str) -> None:
    """Kills every actor of the cluster, its controller first: it would start the others again."""
    names = sorted(_actors_of(cluster), key=lambda name: name != actor_name(cluster, CONTROLLER))
    for name in names:
        with suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    remove_records(cluster)


def stop(name: str | None, *, say: Printer) -> None:
    """Drains a running cluster and removes it. Raises ConfigError when `chosen` finds no or several
    clusters."""
    driver = running(name, idle_beat_s=BEAT_S, say=say)
    driver.stop()
    driver.follow()


def running(name: str | None, *, say: Printer, idle_beat_s: float = IDLE_BEAT_S) -> Driver:
    """A cluster that runs on this Ray. Raises ConfigError when `chosen` finds no or several
    clusters."""
    name = chosen(name, running_clusters())
    controller = find_controller(name)
    if controller is None:
        raise ConfigError(f"the cluster {name} has just gone")
    return Driver(name, controller, idle_beat_s=idle_beat_s, say=say)


def welcome(report: ControllerReport) -> list[str]:
    """The addresses, and a first request to paste."""
    first = report.routers[0]
    body = f'{{"model": "{report.model}", "prompt": "It was", "max_tokens": 32}}'
    return [
        "",
        f"  {report.model} is ready",
        *(f"  HTTP  {router.http}/v1" for router in report.routers),
        *(f"  gRPC  {router.grpc}" for router in report.routers),
        *(f"  metrics  {router.internal_http}/metrics" for router in report.routers),
        "",
        f"  curl {first.http}/v1/completions \\",
        f"    -H 'content-type: application/json' -d '{body}'",
        "",
    ]


def _create_controller(plan: ClusterPlan, *, detach: bool, own: bool) -> Handle:
    name, key = actor_name(plan.name, CONTROLLER), new_key(plan.name)
    driver = None if detach else this_driver()
    put_record(key, ClusterRecord(plan=plan, driver=driver, own=own))
    try:
        controller = (
            ray.remote(Controller)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                resources={ON_THE_HEAD: SMALL},
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=CONTROLLER_CALLS_AT_ONCE,
            )
            .remote(key)
        )
    except ValueError:
        remove_record(key)
        raise ConfigError(
            f"a cluster named {plan.name} already runs on this Ray: choose another --name"
        ) from None
    remove_records(plan.name, but=key)
    return controller


def _wait_gone(cluster: str) -> None:
    """Waits until Ray knows no actor of the cluster. Raises KvrelayError that names the rest."""
    deadline_s = time.monotonic() + GONE_S
    while left := _actors_of(cluster):
        if time.monotonic() > deadline_s:
            raise KvrelayError(f"stopped, but after {GONE_S:g} s Ray still has {', '.join(left)}")
        time.sleep(BEAT_S)


def _actors_of(cluster: str) -> list[str]:
    return [name for name in _actors() if name.startswith(actor_name(cluster, ""))]


def running_clusters() -> list[str]:
    """The names of the clusters on this Ray, in order."""
    suffix = actor_name("", CONTROLLER)
    return sorted(name.removesuffix(suffix) for name in _actors() if name.endswith(suffix))


def chosen(name: str | None, running: Sequence[str]) -> str:
    """The named cluster, else the only one. Raises ConfigError that names the running clusters."""
    if name in running or (name is None and len(running) == 1):
        return name or running[0]
    if not running:
        named = f" named {name}" if name else ""
        raise ConfigError(f"no cluster{named} runs on this Ray")
    names = ", ".join(running)
    if name is None:
        raise ConfigError(f"{len(running)} clusters run on this Ray, choose by --name: {names}")
    raise ConfigError(f"no cluster named {name} runs on this Ray, only {names}")


def _actors() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def find_controller(cluster: str) -> Handle | None:
    try:
        return ray.get_actor(actor_name(cluster, CONTROLLER), namespace=NAMESPACE)
    except (ValueError, RayError):
        return None
