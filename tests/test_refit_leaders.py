"""A leader that is killed in the middle of a refit, and the one that follows it, over each service."""

from __future__ import annotations

import contextlib
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import PeerLost
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.controller import ControllerProcess
from dprims.testing.faults import Fault
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import Service, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 60.0
STAGES, SHARDS = 2, 2


@pytest.mark.parametrize("service", ["tcpstore", "redis", "etcd"], indirect=True)
@pytest.mark.parametrize("phase", ["bucket", "commit"])
def test_a_killed_leader_is_followed_at_the_right_version(
    service: Service, phase: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "backend": service.url,
        "fleet": f"fleet-{uuid.uuid4().hex[:8]}",
        "roster_ttl_s": 2.0,
        "refit_timeout_s": LIMIT_S,
        "bucket_bytes": 64 << 10,
    }
    with (
        contextlib.closing(LocalPolicy(ToySource, stages=STAGES)) as policy,
        contextlib.closing(
            LocalGeneration(ToySink, STAGES, shard_sizes=(1,) * SHARDS, train_world_size=STAGES)
        ) as generation,
        contextlib.closing(ControllerProcess(policy, generation, **options)) as first,
    ):
        first.call("init_communicator", LIMIT_S).result(LIMIT_S)
        first.call("sync_weights").result(LIMIT_S)
        new = [policy.call(rank, "step").result(LIMIT_S) for rank in range(STAGES)]
        held = tmp_path / "held"
        fault = Fault(action="delay", phase=phase, seconds=1.0)
        generation.process(1).call_now("arm", fault, stamp=str(held)).result(LIMIT_S)
        running = first.call("sync_weights")
        until(held.exists, "shard 1 in the middle of the refit")
        first.process.signal(signal.SIGKILL)
        assert isinstance(running.exception(LIMIT_S), PeerLost)

        with CollectiveWeightSynchronizer(policy, generation, **options) as second:
            second.init_communicator(LIMIT_S)
            assert second.version == (2 if phase == "commit" else 1), "what was decided is settled first"
            report = second.refit()
            assert report.members == tuple(range(SHARDS))
            assert report.version == second.version
            for shard in range(SHARDS):
                assert generation.may_serve(shard)
                assert generation.call(shard, "checksums").result(LIMIT_S) == new
