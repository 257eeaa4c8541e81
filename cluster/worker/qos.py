"""Who goes first on a worker, by its settings. Pure."""

from __future__ import annotations

from cluster.settings import WorkerSettings
from decode_worker.standing import Standing
from engine.latency import StepTimes
from engine.prompts.order import Order
from prefill_worker.job import Job


def standing(settings: WorkerSettings) -> Standing:
    return Standing(places=settings.max_running_requests, qos=settings.qos)


def prefill_order(settings: WorkerSettings, times: StepTimes) -> Order[Job]:
    weights = dict(settings.tenant_weights)
    return Order(qos=settings.qos, tenant_weights=weights, times=times)
