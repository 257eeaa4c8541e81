"""The tiers of a cluster file on live processes, and the same load without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.live.outcome import Objectives
from bench.live.stack import processes
from bench.serving.plain_cluster import PlainCluster
from cluster.config.load import load_config
from cluster.config.schema import Config
from engine.bundled import checkpoint_path

FILE = Path(__file__).parents[3] / "deploy" / "configs" / "qos.yaml"
_WORKER_SECTIONS = ("engine", "scheduler")


@dataclass(frozen=True, slots=True)
class TierFile:
    raw: Mapping[str, Any]
    config: Config

    @staticmethod
    def read(path: Path = FILE) -> TierFile:
        return TierFile(yaml.safe_load(path.read_text()), load_config(path))

    def objectives(self, tier: str) -> Objectives:
        """Of a tier that has both."""
        found = self.config.qos.tiers[tier]
        assert found.ttft is not None and found.tpot is not None
        return Objectives(ttft_s=found.ttft, tpot_s=found.tpot)

    @contextmanager
    def serve(self, alike: str | None = None) -> Iterator[PlainCluster]:
        """`alike`: all are of one tier, which has the objectives of this one."""
        qos = self._qos(alike)
        workers = {
            f"{section}.{key}": value
            for section in _WORKER_SECTIONS
            for key, value in self.raw[section].items()
        }
        tiers = {"qos.tiers": qos["tiers"]}
        router = {"qos.header": qos["header"]} | tiers
        with processes(workers | tiers, router, model=checkpoint_path()) as cluster:
            yield cluster

    def _qos(self, alike: str | None) -> dict[str, Any]:
        qos = dict(self.raw["qos"])
        if alike is not None:
            tier = qos["tiers"][alike]
            one = {"ttft": tier["ttft"], "tpot": tier["tpot"], "default": True}
            qos["tiers"] = {"all": one}
        return qos
