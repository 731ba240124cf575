"""The Ray engine: a policy and a generation fleet of Ray actors, on one machine or many.

Ray places the ranks, starts them and notices their death; the weights travel through the same groups as in
any other engine, never through Ray's object store. Importing this needs ``pip install 'dprims[ray]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ..backend import need
from ..exceptions import MembershipError, RefitError
from ._ray_actor import REFIT_THREADS, AsyncRefitActor, OwnedActor, RefitActor
from ._ray_rank import RayRank
from .fleet import START_LIMIT_S, Environment, FleetGeneration, FleetPolicy, environment_of, indexed, of_seat

Options = Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None
"""Options of a rank's actor as for Ray's ``.options()``: one mapping for all, or a function of the seat."""

OURS = {
    "concurrency_groups": "the engine sets it",
    "max_concurrency": "methods of a source or sink are called one after the other",
    "max_restarts": "a rank comes back through restart(), since it has to be attached and sent its weights",
    "max_task_retries": "the engine itself makes again what may come twice",
}
"""Options that a caller cannot give, and why."""


class RayPolicy(FleetPolicy[RayRank]):
    """Trainers as Ray actors: satisfies :class:`~dprims.synchronizer.Policy`.

    ``make_source(stage, *args)`` is called in the actor of each stage's head and returns a
    :class:`~dprims.synchronizer.WeightSource`; :meth:`call` reaches its other methods, one after the other.
    One rank a stage. :meth:`of_actors` takes actors that you have already.

    *options* go to Ray as they are (num_cpus, num_gpus, resources, scheduling_strategy, runtime_env, ...).
    *environment* is set before the actor's process starts: a mapping, or a function of the seat. *device* is
    ``"cpu"``, ``"cuda"`` (the GPU that Ray gave the actor), or one a seat. Ray has to be initialised, in this
    process: a remote ``ray://`` driver cannot serve the leader's store. Returns when all ranks are up, within
    *start_timeout_s*: PeerLost names those for which Ray had no place. What a factory raises keeps its type.
    """

    def __init__(
        self,
        make_source: Callable[..., Any],
        *args: Any,
        stages: int = 1,
        device: str | Sequence[str] = "cpu",
        environment: Environment = None,
        options: Options = None,
        start_timeout_s: float = START_LIMIT_S,
    ) -> None:
        super().__init__(stages, start_timeout_s=start_timeout_s)
        self._device = device
        self._factory = _ActorFactory(make_source, args, environment, options, range(self.world_size))
        self._actors: list[Any] | None = None
        self.host = _node_address()
        self._start_all()

    @classmethod
    def of_actors(
        cls,
        actors: Sequence[Any],
        *,
        device: str | Sequence[str] = "cpu",
        start_timeout_s: float = START_LIMIT_S,
    ) -> RayPolicy:
        """Over the handles of your own actors: the head of each stage, in order. They are never killed here.

        Their class is based on :class:`RefitActor` or :class:`AsyncRefitActor`, with ``refit_source()``.
        """
        policy = cls.__new__(cls)
        FleetPolicy.__init__(policy, len(actors), start_timeout_s=start_timeout_s)
        policy._device, policy._factory = device, None
        policy._actors = [_refit_handle(actor) for actor in actors]
        policy.host = _node_address()
        policy._start_all()
        return policy

    _factory: _ActorFactory | None

    def _start(self, stage: int) -> RayRank:
        device, name = _device(self._device, stage), f"trainer-{stage}"
        if self._factory is not None:
            return self._factory.start(name, "sender", stage, device, (stage,))
        return RayRank(name, _given(self._actors)[stage], "sender", stage, device)

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the source of trainer *rank*; of the actor itself, where that is yours."""
        return _app_call(self.process(rank), method, args, kwargs)

    def restart(self, rank: int, actor: Any = None) -> None:
        """Put a fresh actor in the place of trainer *rank*'s; return when it is up.

        Its source is made anew: to give it the weights of before is the caller's. Where the actors are yours,
        *actor* is the new handle; without one the old handle is attached again, which Ray may have restarted.
        """
        self.process(rank)
        if actor is not None:
            _given(self._actors)[rank] = _refit_handle(actor)
        super().restart(rank)


class RayGeneration(FleetGeneration[RayRank]):
    """Generation shards as Ray actors: satisfies :class:`~dprims.synchronizer.Generation`.

    ``make_sink(shard, worker, *args)`` is called in each rank's actor and returns a
    :class:`~dprims.synchronizer.WeightSink`; :meth:`call` reaches its other methods. Seats follow those of
    *train_world_size* trainers. The other arguments are those of :class:`RayPolicy`. :meth:`of_actors` takes
    actors that you have already.
    """

    def __init__(
        self,
        make_sink: Callable[..., Any],
        *args: Any,
        shard_sizes: Iterable[int] = (1,),
        train_world_size: int = 1,
        device: str | Sequence[str] = "cpu",
        environment: Environment = None,
        options: Options = None,
        start_timeout_s: float = START_LIMIT_S,
    ) -> None:
        super().__init__(shard_sizes, train_world_size, start_timeout_s=start_timeout_s)
        self._device = device
        seats = range(train_world_size, train_world_size + self.get_inference_world_size())
        self._factory = _ActorFactory(make_sink, args, environment, options, seats)
        self._actors: dict[int, Any] | None = None
        self._start_shards(self.worker_group.shards)

    @classmethod
    def of_actors(
        cls,
        shards: Sequence[Sequence[Any]],
        *,
        train_world_size: int = 1,
        device: str | Sequence[str] = "cpu",
        start_timeout_s: float = START_LIMIT_S,
    ) -> RayGeneration:
        """Over the handles of your own actors: a sequence a shard. They are never killed here.

        Their class is based on :class:`RefitActor` or :class:`AsyncRefitActor`, with ``refit_sink()``.
        """
        generation = cls.__new__(cls)
        sizes = tuple(len(shard) for shard in shards)
        FleetGeneration.__init__(generation, sizes, train_world_size, start_timeout_s=start_timeout_s)
        generation._device, generation._factory = device, None
        handles = [_refit_handle(actor) for shard in shards for actor in shard]
        generation._actors = dict(enumerate(handles, train_world_size))
        generation._start_shards(generation.worker_group.shards)
        return generation

    _factory: _ActorFactory | None

    def _start(self, shard: int, worker: int, seat: int) -> RayRank:
        device, name = _device(self._device, seat), f"shard-{shard}-{worker}"
        if self._factory is not None:
            return self._factory.start(name, "receiver", seat, device, (shard, worker))
        return RayRank(name, _given(self._actors)[seat], "receiver", seat, device)

    def call(self, shard: int, method: str, *args: Any, worker: int = 0, **kwargs: Any) -> Future[Any]:
        """Call a method of the sink of a shard's rank; of the actor itself, where that is yours."""
        return _app_call(self.process(shard, worker), method, args, kwargs)

    def restart(self, shard: int, actors: Sequence[Any] | None = None) -> None:
        """Put fresh actors in the place of a shard's; return when they are up.

        Where the actors are yours, *actors* are the new handles, one a rank; without them the old handles are
        attached again, which Ray may have restarted (``max_restarts``).
        """
        seats = self._seats(shard)
        if actors is not None:
            if len(actors) != len(seats):
                raise MembershipError(
                    f"shard {shard} has {len(seats)} ranks; {len(actors)} actors were given"
                )
            _given(self._actors).update(zip(seats, map(_refit_handle, actors), strict=True))
        super().restart(shard)


class _ActorFactory:
    """Starts actors of the engine's own. Options are checked for every seat before the first one starts."""

    def __init__(
        self,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        environment: Environment,
        options: Options,
        seats: Iterable[int],
    ) -> None:
        self._ray = need("ray", "ray")
        _node_address()
        if not callable(make):
            raise RefitError(f"the factory is {make!r}; expected something to call in the actor")
        self._make, self._args = make, args
        self._environment, self._options = environment, options
        self._class = self._ray.remote(concurrency_groups=dict(REFIT_THREADS))(OwnedActor)
        for seat in seats:
            self._class.options(**self._options_of(seat))  # Ray refuses what it does not know

    def start(self, name: str, role: str, seat: int, device: str, who: tuple[int, ...]) -> RayRank:
        """Start the actor of a seat; return without waiting for it."""
        actor = self._class.options(**self._options_of(seat)).remote()
        return RayRank(name, actor, role, seat, device, build=(self._make, (*who, *self._args), device))

    def _options_of(self, seat: int) -> dict[str, Any]:
        options = dict(self._options(seat) if callable(self._options) else self._options or {})
        for name in OURS.keys() & options.keys():
            raise RefitError(f"options of seat {seat} have {name}: {OURS[name]}")
        environment = environment_of(self._environment, seat)
        if environment:
            runtime = dict(options.get("runtime_env") or {})
            runtime["env_vars"] = {**runtime.get("env_vars", {}), **environment}
            options["runtime_env"] = runtime
        return options


def _app_call(rank: RayRank, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
    if rank.owned:
        return rank.call("app_call", method, args, kwargs)
    return rank.call(method, *args, **kwargs)


def _given(actors: Any) -> Any:
    if actors is None:
        raise RefitError("this engine starts its actors itself: it takes none")
    return actors


def _refit_handle(actor: Any) -> Any:
    if not hasattr(actor, "dprims_refit"):
        raise RefitError(
            f"{actor!r} is no handle of a Ray actor whose class is based on RefitActor or AsyncRefitActor"
        )
    return actor


def _device(devices: str | Sequence[str], seat: int) -> str:
    return indexed(of_seat(devices, seat))  # Ray shows an actor its own GPUs alone


def _node_address() -> str:
    """The address of this node that other nodes of the Ray cluster reach."""
    ray = need("ray", "ray")
    if not ray.is_initialized():
        raise RefitError("Ray is not initialised: call ray.init(), or ray.init(address='auto') on a cluster")
    if ray.util.client.ray.is_connected():
        raise RefitError(
            "this driver is a Ray client (ray://), which no rank can reach; run it in the cluster, as a job"
        )
    address: str = ray.util.get_node_ip_address()
    return address


__all__ = ["REFIT_THREADS", "AsyncRefitActor", "RayGeneration", "RayPolicy", "RefitActor"]
