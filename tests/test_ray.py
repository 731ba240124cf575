"""The Ray engine on a real Ray of two nodes: refits, deaths, nodes that go and come, actors of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dprims.exceptions import (
    BackendMisconfigured,
    DprimsError,
    MembershipError,
    PeerLost,
    RefitAborted,
    RefitError,
)
from dprims.synchronizer import CollectiveWeightSynchronizer, DictSink
from dprims.testing.faults import Fault, InjectedFault
from dprims.testing.weights import ToySink, ToySource, toy_tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ray = pytest.importorskip("ray", reason="the ray extra is not installed")

from ray.cluster_utils import Cluster  # noqa: E402

from dprims.engines.ray import (  # noqa: E402
    REFIT_THREADS,
    AsyncRefitActor,
    RayGeneration,
    RayPolicy,
    RefitActor,
)

from .helpers import services  # noqa: E402

LIMIT_S = 60.0
until = partial(services.until, limit=LIMIT_S)
SHARDS = 3
FAR = 2
"""The shard on the second node."""
TTL_S = 2.0
BUCKET = 64 << 10
MIDDLE = 2
FREE: dict[str, Any] = {"num_cpus": 0}
NEAR = FREE | {"resources": {"near": 1}}

ACTORS = re.compile("ray::(OwnedActor|Server|AsyncServer|Learner|Mistaken|DictSink)")
"""How the processes of these tests' actors are called."""


class Machines:
    """A Ray cluster of two nodes on this machine, and the processes of it that outlive a test on purpose."""

    def __init__(self) -> None:
        # where no nameserver answers, gRPC's own resolver waits five seconds for it
        os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
        # how soon Ray calls a node dead that gives no sign: 15 s or more as it comes
        quick: dict[str, Any] = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300}
        quick |= {"health_check_failure_threshold": 4, "health_check_timeout_ms": 2000}
        # workers have torch in them before an actor needs one, as the local engine's fork server has
        quick |= {"preload_python_modules": ["torch", "dprims.synchronizer.workers"]}
        quick |= {"worker_niceness": 0}  # not 15, at which a busy machine leaves them nothing
        self.ray = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 2,
                "resources": {"near": 8},
                "object_store_memory": 80 << 20,
                "_system_config": quick,
            },
        )
        self.far: Any = None
        self.add_far()
        ray.init(address=self.ray.address, log_to_driver=False, logging_level="error", namespace="test")
        self.kept: list[Any] = []
        """Handles of ranks that other tests go on with."""

    def add_far(self) -> None:
        self.far = self.ray.add_node(num_cpus=1, resources={"far": 4}, object_store_memory=80 << 20)

    def remove_far(self) -> None:
        self.ray.remove_node(self.far, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self.ray.shutdown()

    @property
    def pids(self) -> set[int]:
        """All that Ray runs, less actors that nobody keeps."""
        kept = {handle.pid for handle in self.kept}
        found: set[int] = set()
        parents = [process.pid for node in self.ray.list_all_nodes() for _, process in node.live_processes()]
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        while parents:
            pid = parents.pop()
            if pid in kept or not ACTORS.match(title(pid)):
                found.add(pid)
            parents += children.get(pid, [])
        return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def machines(outliving: list[Any]) -> Iterator[Machines]:
    machines = Machines()
    outliving.append(machines)
    try:
        yield machines
    finally:
        machines.close()
        outliving.remove(machines)


class Fleet:
    """One trainer and three shards, the last of them on the other node."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.policy = RayPolicy(ToySource, options=NEAR)
        self.generation = RayGeneration(
            ToySink,
            1,
            shard_sizes=(1,) * SHARDS,
            options=lambda seat: FREE | {"resources": {"far" if seat == 1 + FAR else "near": 1}},
        )
        self.sync = synchronizer(self.policy, self.generation)
        self.sync.init_communicator(timeout=LIMIT_S)
        self.keep()

    def keep(self) -> None:
        self.machines.kept = [self.policy.process(0), *map(self.generation.process, range(SHARDS))]

    def heal(self) -> None:
        """All shards in, all at one version."""
        for shard in self.generation.dead_shards:
            self.generation.restart(shard)
        self.keep()
        self.sync.reconcile_communicator([])
        assert self.sync.sync_weights().members == tuple(range(SHARDS))

    def train(self) -> list[str]:
        self.sync.mark_stale()
        return [self.policy.call(0, "step").result(LIMIT_S)]

    def weights(self) -> list[str]:
        return [self.policy.call(0, "checksum").result(LIMIT_S)]

    def arm(self, shard: int, action: str, **more: Any) -> None:
        fault = Fault(action=action, bucket=MIDDLE, **more)
        self.generation.process(shard).call_now("arm", fault).result(LIMIT_S)

    def hold(self, shard: int, stamp: Path, seconds: float = 30.0) -> None:
        """Have a shard stand still in the middle of its next refit; the file is there when it does."""
        fault = Fault(action="delay", bucket=MIDDLE, seconds=seconds)
        self.generation.process(shard).call_now("arm", fault, stamp=str(stamp)).result(LIMIT_S)

    def all_at(self, expected: list[str], shards: Any = range(SHARDS)) -> None:
        for shard in shards:
            found = self.generation.call(shard, "checksums").result(LIMIT_S)
            assert found == expected, f"shard {shard} holds other weights"
            assert self.generation.may_serve(shard)

    def close(self) -> None:
        self.generation.close()
        self.policy.close()
        self.sync.shutdown()
        self.machines.kept = []


def synchronizer(policy: Any, generation: Any, **options: Any) -> CollectiveWeightSynchronizer:
    settings = {"refit_timeout_s": 30.0, "stall_timeout_s": 20.0, "roster_ttl_s": TTL_S}
    return CollectiveWeightSynchronizer(policy, generation, bucket_bytes=BUCKET, **{**settings, **options})


@pytest.fixture(scope="module")
def shared(machines: Machines) -> Iterator[Fleet]:
    fleet = Fleet(machines)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def fleet(shared: Fleet) -> Iterator[Fleet]:
    shared.heal()
    yield shared
    shared.keep()


@contextlib.contextmanager
def in_mid_refit(fleet: Fleet, stamp: Path) -> Iterator[list[Any]]:
    """Run a sync beside the body, which begins when the fault that leaves *stamp* has struck."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(fleet.sync.sync_weights())
        except DprimsError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: stamp.exists() or outcome, "the fault")
        assert not outcome
        yield outcome
    finally:
        thread.join(LIMIT_S)
    assert outcome


# -- the engine's own actors ------------------------------------------------------------------------------


def test_a_refit_across_two_nodes(fleet: Fleet) -> None:
    expected = fleet.train()
    report = fleet.sync.sync_weights(kv_scales={"k": 0.5})
    assert report.members == (0, 1, 2)
    fleet.all_at(expected)
    assert fleet.generation.call(0, "history").result(LIMIT_S)[-4:] == [
        "pause",
        f"commit {report.version}",
        "after_commit",
        "resume",
    ]
    nodes = [fleet.generation.process(shard).place.node for shard in range(SHARDS)]  # type: ignore[union-attr]
    assert nodes[0] == nodes[1] != nodes[FAR]
    assert fleet.sync.rendezvous is not None
    assert fleet.sync.rendezvous[0] == ray.util.get_node_ip_address()


def test_a_killed_actor_ends_the_refit_by_name_and_is_taken_back(fleet: Fleet) -> None:
    old = fleet.weights()
    new = fleet.train()
    fleet.arm(1, "kill")
    pid = fleet.generation.process(1).pid
    with pytest.raises(
        PeerLost, match=rf"seat 2: shard-1-0 \(actor \w+, pid {pid} on node .*died: its worker"
    ):
        fleet.sync.sync_weights()
    assert fleet.generation.dead_shards == (1,)
    assert not fleet.generation.may_serve(1)
    fleet.all_at(old, (0, 2))
    assert fleet.sync.reconcile_communicator(fleet.generation.dead_shards, force=True)
    assert fleet.sync.sync_weights().members == (0, 2)
    fleet.all_at(new, (0, 2))
    fleet.generation.restart(1)
    assert fleet.generation.dead_shards == ()
    assert not fleet.generation.may_serve(1)
    assert fleet.sync.reconcile_communicator([])
    assert fleet.sync.sync_weights(only=[1]).members == (0, 1, 2)
    fleet.all_at(new)


def test_ray_kill_in_mid_refit_is_a_death(fleet: Fleet, tmp_path: Path) -> None:
    old = fleet.weights()
    new = fleet.train()
    fleet.hold(1, tmp_path / "struck")
    with in_mid_refit(fleet, tmp_path / "struck") as outcome:
        ray.kill(fleet.generation.process(1).actor)
    assert isinstance(outcome[0], PeerLost)
    assert "shard-1-0" in str(outcome[0])
    fleet.all_at(old, (0, 2))
    assert fleet.sync.sync_weights().members == (0, 2)
    fleet.all_at(new, (0, 2))


def test_a_node_is_killed_in_mid_refit_and_another_takes_its_place(
    fleet: Fleet, machines: Machines, tmp_path: Path
) -> None:
    old = fleet.weights()
    new = fleet.train()
    fleet.hold(FAR, tmp_path / "struck")
    with in_mid_refit(fleet, tmp_path / "struck") as outcome:
        machines.remove_far()
    assert isinstance(outcome[0], RefitError)
    fleet.all_at(old, (0, 1))
    until(lambda: fleet.generation.dead_shards == (FAR,), "the death of the node's actor")
    assert fleet.sync.sync_weights().members == (0, 1)
    fleet.all_at(new, (0, 1))
    gone = fleet.generation.process(FAR).place
    machines.add_far()
    fleet.generation.restart(FAR)
    came = fleet.generation.process(FAR).place
    assert gone is not None
    assert came is not None
    assert came.node != gone.node
    assert fleet.sync.reconcile_communicator([])
    assert fleet.sync.sync_weights(only=[FAR]).members == (0, 1, 2)
    fleet.all_at(new)


def test_an_actor_out_of_reach_for_a_moment_stays_in_the_refit(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = fleet.train()
    fleet.hold(1, tmp_path / "struck", seconds=2.0)
    with in_mid_refit(fleet, tmp_path / "struck") as outcome:
        assert cut_connections(fleet.generation.process(1).pid, but=fleet.sync.rendezvous)
    assert not isinstance(outcome[0], Exception), outcome[0]
    assert outcome[0].members == (0, 1, 2)
    assert fleet.generation.dead_shards == ()
    assert "out of reach" in caplog.text
    fleet.all_at(new)


def test_a_frozen_actor_lapses_and_is_not_called_dead(fleet: Fleet) -> None:
    old = fleet.weights()
    new = fleet.train()
    fleet.arm(0, "stop")
    with pytest.raises(PeerLost, match="roster entry of seat 1 lapsed"):
        fleet.sync.sync_weights()
    assert fleet.generation.dead_shards == ()
    fleet.all_at(old, (1, 2))
    assert fleet.sync.sync_weights().members == (1, 2)
    os.kill(fleet.generation.process(0).pid, signal.SIGCONT)
    until(lambda: fleet.sync.sync_weights().members == (0, 1, 2), "the thawed shard's return")
    fleet.all_at(new)


def test_a_frozen_actor_can_be_replaced(fleet: Fleet) -> None:
    pid = fleet.generation.process(0).pid
    os.kill(pid, signal.SIGSTOP)
    fleet.generation.restart(0)
    assert fleet.generation.process(0).pid != pid
    until(lambda: not title(pid), "the end of the frozen process")


def test_errors_keep_their_type(fleet: Fleet) -> None:
    fleet.arm(0, "raise")
    with pytest.raises(RefitAborted, match="InjectedFault") as failure:
        fleet.sync.sync_weights()
    assert isinstance(failure.value.__cause__, InjectedFault)
    with pytest.raises(AttributeError, match="no_such_method"):
        fleet.generation.call(0, "no_such_method").result(LIMIT_S)
    with pytest.raises(TypeError):
        fleet.policy.call(0, "checksum", threading.Lock()).result(LIMIT_S)


def test_actors_end_with_their_engine(machines: Machines) -> None:
    generation = RayGeneration(ToySink, 1, shard_sizes=(2,), options=NEAR)
    pids = [generation.process(0, worker).pid for worker in range(2)]
    assert all(map(title, pids))
    generation.close()
    generation.close()
    until(lambda: not any(map(title, pids)), "the end of the actors")
    with pytest.raises(PeerLost):
        generation.call(0, "history").result(LIMIT_S)


# -- the user's actors ------------------------------------------------------------------------------------


class Server(RefitActor):
    """A user's actor, that serves one request at a time."""

    def __init__(self) -> None:
        self.sink = ToySink(0, 0, 1)
        self.finish = threading.Event()

    def refit_sink(self) -> DictSink:
        return self.sink

    def checksums(self) -> list[str]:
        return self.sink.checksums()

    def long_request(self, seconds: float) -> str:
        time.sleep(seconds)
        return "answered"


class AsyncServer(AsyncRefitActor):
    """The same with an event loop."""

    def __init__(self) -> None:
        self.sink = ToySink(0, 0, 1)

    def refit_sink(self) -> DictSink:
        return self.sink

    async def checksums(self) -> list[str]:
        return self.sink.checksums()

    async def long_request(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "answered"


class Learner(RefitActor):
    """A user's trainer."""

    def refit_source(self) -> ToySource:
        self.source = ToySource(0)
        return self.source

    def checksum(self) -> str:
        return self.source.checksum()


class Mistaken(RefitActor):
    """It has an async method and the base of an actor that has none."""

    async def something(self) -> None: ...


def actor(actor_class: type, **options: Any) -> Any:
    return ray.remote(concurrency_groups=REFIT_THREADS)(actor_class).options(**NEAR, **options).remote()


def test_actors_of_the_user(machines: Machines) -> None:
    learner = actor(Learner)
    servers = [actor(Server, max_restarts=1), actor(AsyncServer)]
    policy = RayPolicy.of_actors([learner])
    generation = RayGeneration.of_actors([[server] for server in servers])
    sync = synchronizer(policy, generation)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        requests = [generation.call(shard, "long_request", 3.0) for shard in range(2)]
        assert sync.sync_weights().members == (0, 1)  # beside the requests
        assert [request.done() for request in requests] == [False, False]
        weights = [policy.call(0, "checksum").result(LIMIT_S)]
        assert [generation.call(shard, "checksums").result(LIMIT_S) for shard in range(2)] == [weights] * 2

        # another controller's engine takes the ranks over as they are
        successor = RayGeneration.of_actors([[server] for server in servers])
        assert [successor.process(shard).place for shard in range(2)] == [
            generation.process(shard).place for shard in range(2)
        ]
        assert all(map(successor.may_serve, range(2)))

        # Ray restarts the actor: for a refit it is dead all the same, as its weights are
        sync.mark_stale()
        generation.process(0).call_now("arm", Fault(action="kill", bucket=MIDDLE)).result(LIMIT_S)
        with pytest.raises(RefitError):
            sync.sync_weights()
        until(lambda: generation.dead_shards == (0,), "the death of the process in the actor")
        assert sync.sync_weights().members == (1,)
        generation.restart(0)
        assert sync.reconcile_communicator([])
        assert sync.sync_weights(only=[0]).members == (0, 1)
        assert generation.call(0, "checksums").result(LIMIT_S) == weights

        # one that is gone for good is replaced by another
        ray.kill(servers[1])
        until(lambda: generation.dead_shards == (1,), "the death of the actor")
        with pytest.raises(PeerLost, match="shard-1-0"):
            generation.restart(1)
        with pytest.raises(MembershipError, match="shard 1 has 1 ranks; 2 actors were given"):
            generation.restart(1, servers)
        servers[1] = actor(AsyncServer)
        generation.restart(1, [servers[1]])
        assert sync.sync_weights().members == (0, 1)
        generation.close()
        assert ray.get(servers[1].checksums.remote(), timeout=LIMIT_S) == weights  # it is the user's still
    finally:
        generation.close()
        policy.close()
        sync.shutdown()
        for one in (learner, *servers):
            ray.kill(one)


# -- wrong arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"options": {"max_restarts": 3}}, RefitError, "max_restarts"),
        ({"options": {"max_concurrency": 3}}, RefitError, "max_concurrency"),
        ({"options": {"num_cpu": 1}}, ValueError, "num_cpu"),
        ({"options": lambda seat: {"num_gpus": -seat}}, ValueError, "num_gpus|quantity"),
        ({"shard_sizes": (1, 0)}, MembershipError, "shard_sizes"),
        ({"train_world_size": 0}, MembershipError, "train_world_size"),
        ({"shard_sizes": 2}, MembershipError, "shard_sizes is 2; expected one or more sizes"),
        ({"device": ["cpu"]}, MembershipError, "which has none for seat 1"),
        (
            {"options": {"resources": {"nowhere": 1}}, "start_timeout_s": 0.5},
            PeerLost,
            "1 of 1 ranks were not up within 0.5 s: shard-0-0",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    machines: Machines, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        RayGeneration(ToySink, 1, **options)


def test_a_backend_that_actors_do_not_see_is_refused(machines: Machines) -> None:
    policy = RayPolicy(ToySource, options=NEAR)
    try:
        generation = RayGeneration(ToySink, 1, options=NEAR)
        try:
            with (
                CollectiveWeightSynchronizer(policy, generation, backend="memory://ray") as sync,
                pytest.raises(BackendMisconfigured, match="the ranks of RayPolicy are in others"),
            ):
                sync.init_communicator()
            with pytest.raises(MembershipError, match=r"rank is 5; there are ranks 0\.\.0"):
                policy.call(5, "step")
        finally:
            generation.close()
    finally:
        policy.close()


def test_a_factory_that_fails_is_raised_with_its_type(machines: Machines) -> None:
    with pytest.raises(TypeError):
        RayPolicy(ToySource, "no layers", "no width", options=NEAR)
    with pytest.raises(RefitError, match="expected something to call"):
        RayPolicy(None)  # type: ignore[arg-type]


def test_an_actor_that_cannot_take_part_is_said(machines: Machines) -> None:
    server, mistaken = actor(Server), actor(Mistaken)
    stranger = ray.remote(DictSink).options(**NEAR).remote(toy_tensors(0, 1, 8))
    try:
        with pytest.raises(RefitError, match=r"Server does not define refit_source\(\)"):
            RayPolicy.of_actors([server])
        with pytest.raises(RefitError, match="Mistaken has async methods"):
            RayGeneration.of_actors([[mistaken]])
        with pytest.raises(
            RefitError, match="is no handle of a Ray actor whose class is based on RefitActor"
        ):
            RayGeneration.of_actors([[stranger]])
    finally:
        for one in (server, mistaken, stranger):
            ray.kill(one)


def test_without_ray_initialised_it_says_so() -> None:
    code = """
from dprims.engines.ray import RayPolicy
from dprims.testing.weights import ToySource
try:
    RayPolicy(ToySource)
except Exception as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert "RefitError Ray is not initialised: call ray.init()" in run.stdout, run.stderr


def cut_connections(pid: int, *, but: Any) -> int:
    """Shut down all connections that this process has with *pid*, less those to a store; their number."""
    ours, theirs = tcp(os.getpid()), tcp(pid)
    store = f":{but[1]:04X}"
    ends = {(there, here) for here, there in theirs.values() if not there.endswith(store)}
    count = 0
    for descriptor, (here, there) in ours.items():
        if (here, there) in ends:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                end.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def tcp(pid: int) -> dict[int, tuple[str, str]]:
    """Both ends of each TCP connection of a process, by file descriptor."""
    table = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            table[fields[9]] = (fields[1][-13:], fields[2][-13:])
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            link = os.readlink(entry)
            if link.startswith("socket:[") and link[8:-1] in table:
                found[int(entry.name)] = table[link[8:-1]]
    return found
