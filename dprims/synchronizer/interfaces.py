"""What the synchronizer asks of others: what is handed to it satisfies a protocol of this file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from .calls import RefitCall, RefitSite
    from .plan import Bucket, Plan, TensorMeta
    from .report import RefitReport

__all__ = [
    "BatchedSource",
    "Cluster",
    "Generation",
    "LendingSink",
    "Policy",
    "WeightSink",
    "WeightSource",
    "WeightSynchronizer",
    "WorkerGroup",
]

# weights --------------------------------------------------------------------------------------------


@runtime_checkable
class WeightSource(Protocol):
    """The sender's weights. Metadata is asked for often and is cheap; the tensors are read once a refit."""

    def metadata(self) -> Sequence[TensorMeta]:
        """Every tensor, in the order of iteration; an alias names the tensor that it shares."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor whose bytes travel (no aliases), in the order of `metadata`, afresh at each call.

        A yielded tensor lives on the communicator's device and is not changed until the refit is over. Where
        yielding gathers shards, all ranks that hold one iterate, in step.
        """
        ...


@runtime_checkable
class BatchedSource(WeightSource, Protocol):
    """A source that is better asked for many tensors at once, such as one that gathers shards."""

    def in_batches(self, batches: Sequence[Sequence[str]]) -> Iterator[Sequence[Tensor]]:
        """The tensors of each batch of names, together the names of `metadata` without aliases, in order.

        Nothing of a batch is done before it is asked for. Raises RefitError when the names are others.
        """
        ...


@runtime_checkable
class WeightSink(Protocol):
    """A receiver's weights: staged while they come, and live at `commit`.

    Calls come from one thread at a time, in the order begin, write..., commit or rollback. Names that the
    sink does not hold are its to ignore.
    """

    def begin(self, version: int, metas: Sequence[TensorMeta]) -> None:
        """A transfer of `version` begins. Drops what is still staged.

        Raises HandshakeMismatch when what comes does not fit what the sink holds.
        """
        ...

    def write(self, name: str, tensor: Tensor) -> None:
        """One whole tensor has arrived. The memory is used again: keep a copy (unless the sink lent it)."""
        ...

    def commit(self, version: int) -> None:
        """What was staged for `version` becomes live. Committing what is live already does nothing."""
        ...

    def rollback(self) -> None:
        """Drop what is staged; what is live stays. Does nothing when nothing is staged."""
        ...


@runtime_checkable
class LendingSink(WeightSink, Protocol):
    """A sink that lends its staging memory, so that bytes arrive in place and nothing is copied.

    After `rollback` lent memory is never lent again: an abandoned gloo receive may still write into it.
    """

    in_place: bool
    """Whether lent memory is live."""

    torn: bool
    """Whether live weights may be a mixture of versions: from the first byte in place until `commit`."""

    def staging_bytes(self, plan: Plan) -> int:
        """Memory that the sink will newly take for a transfer of `plan`, in bytes."""
        ...

    def lend_bucket(self, plan: Plan, bucket: Bucket) -> Tensor | None:
        """Flat uint8 memory of `bucket.nbytes`, where a bucket of whole tensors arrives as it is laid out.

        None to have its tensors written from a buffer of the transfer's own.
        """
        ...

    def lend_tensor(self, meta: TensorMeta) -> Tensor | None:
        """Flat uint8 memory of `meta.nbytes` for a direct tensor whose bucket was not lent; or None.

        `meta` has a name that the sink holds: where it is not the tensor's own, it is an alias's.
        """
        ...

    def holds(self, name: str) -> bool:
        """Whether `write` does anything with this name."""
        ...

    def write_bucket(self, tensors: Mapping[str, Tensor], *, lent: bool) -> None:
        """`write` for what came whole with one bucket, in order; for its aliases, and scales, once more.

        With `lent` all lie in memory that the sink lent; without, each may.
        """
        ...


# policy and generation ------------------------------------------------------------------------------


class Cluster(Protocol):
    """Where ranks run; asked only for what the policy or the generation does not know itself."""

    def world_size(self) -> int:
        """The number of ranks."""
        ...


class WorkerGroup(Protocol):
    """The shards of a generation: each lives, dies, pauses and commits as one."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of ranks of each shard, dead ones included."""
        ...

    def incarnation(self, shard: int) -> Sequence[int]:
        """The incarnation of each rank of *shard* as it was last known."""
        ...


class Policy(Protocol):
    """The trainers. Each method returns at once, with one future a rank, in seat order.

    A seat is a rank's number in the complete fleet: trainers first, then the shards in order. The futures of
    calls are done with a RefitAnswer, those of ``prepare_refit_info`` with a RankInfo; PeerLost says that
    the rank's process is gone for good, any other exception that the call failed. A future is a
    ``concurrent.futures.Future`` or has a ``.future()`` that gives one.
    """

    world_size: int
    """The number of trainer ranks."""

    def prepare_refit_info(self, site: RefitSite, known: Mapping[int, str]) -> Sequence[Any]:
        """Have every trainer join at *site*, and say what it sends, where *known* has not its digest."""
        ...

    def init_collective(self, call: RefitCall) -> Sequence[Any]:
        """Build the weight groups of ``call.epoch`` on the addressed ranks."""
        ...

    def broadcast_weights_for_collective(self, call: RefitCall) -> Sequence[Any]:
        """Send the weights."""
        ...

    def rollback(self, call: RefitCall) -> Sequence[Any]:
        """Give up what runs."""
        ...

    def ask(self, call: RefitCall) -> Sequence[Any]:
        """Say what you hold, and follow ``call.epoch``'s term."""
        ...


class Generation(Protocol):
    """The generation ranks; futures as for :class:`Policy`.

    ``worker_group`` may be None or missing where a generation tracks no shards: then all of it is one.
    """

    worker_group: Any

    def get_inference_world_size(self) -> int | None:
        """The number of generation ranks, dead ones included; None when the cluster has to be asked."""
        ...

    def prepare_refit_info(self, info: RefitSite) -> Sequence[Any]:
        """Have every rank join at the site; a rank that is gone has PeerLost."""
        ...

    def init_collective(self, call: RefitCall) -> Sequence[Any]:
        """Build the weight groups of ``call.epoch`` on the addressed ranks."""
        ...

    def update_weights_from_collective(self, call: RefitCall) -> Sequence[Any]:
        """Receive the weights into staging."""
        ...

    def pause(self, call: RefitCall) -> Sequence[Any]:
        """Stop serving; done when work in flight has stopped or was fenced."""
        ...

    def commit(self, call: RefitCall) -> Sequence[Any]:
        """Make what is staged live."""
        ...

    def resume(self, call: RefitCall) -> Sequence[Any]:
        """Serve again."""
        ...

    def rollback(self, call: RefitCall) -> Sequence[Any]:
        """Drop what is staged, and give up what runs."""
        ...

    def ask(self, call: RefitCall) -> Sequence[Any]:
        """Say what you hold, and follow ``call.epoch``'s term."""
        ...


class WeightSynchronizer(ABC):
    """Keeps the weights of a generation those of a policy."""

    @abstractmethod
    def init_communicator(self) -> None:
        """Set up whatever carries the weights."""

    @abstractmethod
    def sync_weights(self, timer: Any = None, kv_scales: Mapping[str, float] | None = None) -> RefitReport:
        """Send the policy's weights to the generation."""

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the generation may hold other weights than the policy."""

    @abstractmethod
    def mark_stale(self) -> None:
        """Say that the policy changed its weights."""

    def reconcile_communicator(self, absent_shards: Sequence[int], force: bool = False) -> bool:
        """Rebuild over the surviving shards; False where a synchronizer owns no membership."""
        return False

    def shutdown(self) -> None:  # noqa: B027 - nothing to do is a sound default
        """Let go of what carries the weights."""
