"""What a cluster asks of its machine, against what the machine offers."""

from __future__ import annotations

import pytest

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.core.plan import ClusterPlan, RayResources, placements, plan_cluster, shortage
from cluster.core.resolve import Site, resolve

SITE = Site(total_cpus=2, node_cpus=2, host="127.0.0.1", bundled_path="/bundled")


def plan(*texts: str) -> ClusterPlan:
    return plan_cluster(resolve(load_config(None, map(Override.parse, texts)), SITE))


@pytest.mark.parametrize(
    ("texts", "short"),
    [
        ([], None),
        (["workers.0.device=cuda:0", "workers.1.device=cuda:0"], None),
        (["workers.0.device=cuda", "workers.1.device=cuda"], "GPU: 2 and this machine has 1"),
        (["workers.0.cpu_threads=5"], "CPU: 6 and this machine has 2"),
        (["workers.1.resources.memory=3.0e+9"], "memory: 3e+09 and this machine has 1e+09"),
        (["workers.1.resources.rack=1"], "rack: 1 and this machine has 0"),
        (["router.resources.rack=1"], "rack: 1 and this machine has 0"),
        (["workers.0.accelerator_type=H100"], "accelerator_type:H100: 0.001 and this machine has"),
    ],
)
def test_what_is_short(texts: list[str], short: str | None) -> None:
    said = shortage(plan(*texts), {"CPU": 2.0, "GPU": 1.0, "memory": 1e9})
    if short is None:
        assert said is None
    else:
        assert said is not None
        assert said.startswith(f"the cluster asks for {short}")


def test_thirds_of_a_gpu_make_one() -> None:
    pools = "workers=[{role: both, replicas: 3, device: 'cuda:0'}]"
    assert shortage(plan(pools), {"CPU": 3.0, "GPU": 1.0}) is None


def test_each_process_says_what_it_needs() -> None:
    needs = {name: str(place) for name, place in placements(plan("workers.0.device=cuda")).items()}
    assert needs == {"router-0": "{}", "prefill-0": "{CPU: 1, GPU: 1}", "decode-0": "{CPU: 1}"}
    assert str(RayResources(custom=(("rack", 0.5),))) == "{rack: 0.5}"
