"""The number of workers of a cluster on Ray follows what clients ask for, most of it refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvrelay import Client
from tests.integration.ray_head import Head, ray_head, until
from tests.integration.test_apply_ray import names, refused
from tests.integration.test_roles import SLOW, offering
from tests.integration.test_serve_ray import KVRELAY, addresses, assert_nothing_is_left

pytestmark = pytest.mark.ray

FILE = """
name: growing
model: {{dtype: float32}}
router: {{http_port: 0, grpc_port: 0}}
pool: {{enabled: "off"}}
engine: {{compile: "off", profile: {times}}}
attention: {{backend: sdpa}}
elastic: {{cooldown: 4s, start_up: 5s, window: 3s}}
workers:
  - {{role: prefill, cpu_threads: 1, resources: {{CPU: 0.25}}}}
  - {{role: decode, replicas: {{min: 1, max: 2}}, cpu_threads: 1, resources: {{CPU: 0.25}}}}
"""
ASKED = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head({}) as started:
        yield started


def test_workers_come_for_what_is_refused_and_leave_when_nobody_asks(
    head: Head, tmp_path: Path
) -> None:
    log, file, times, here = *(tmp_path / n for n in ("log", "c.yaml", "times.yaml")), head.joined()
    times.write_text(yaml.safe_dump(SLOW))
    file.write_text(FILE.format(times=times))
    driver = here.start(KVRELAY, "apply", file, "--yes", "--follow", log=log)
    http, grpc = addresses(driver, log)
    before = ["router-0", "prefill-0", "decode-0"]
    assert names(head) == before
    assert "its number follows the offered work, from 1 to 2" in refused(head, "scale", "decode=2")
    with Client(grpc, timeout_s=120) as client:
        expected = client.generate("It was", **ASKED).token_ids  # type: ignore[arg-type]
        with offering(grpc, tokens=2, max_tokens=250):
            until(lambda: names(head) == [*before, "decode-1"])
            until(lambda: "1 workers more" in log.read_text())
        until(lambda: len(names(head)) == 3)
        assert client.generate("It was", **ASKED).token_ids == expected  # type: ignore[arg-type]
    until(lambda: "leaves: offered work keeps" in log.read_text())
    assert "nothing changes" in here.run(KVRELAY, "apply", file, "--yes")
    driver.terminate()
    driver.wait()
    here.run(KVRELAY, "stop")
    assert_nothing_is_left(head.marked, http, grpc)
