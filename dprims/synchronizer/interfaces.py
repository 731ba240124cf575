"""What the synchronizer asks of others: what is handed to it satisfies a protocol of this file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from .plan import Bucket, Plan, TensorMeta

__all__ = ["LendingSink", "WeightSink", "WeightSource"]

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
        """Flat uint8 memory of `bucket.nbytes` for a packed bucket.

        None to have its tensors written from a buffer of the transfer's own.
        """
        ...

    def lend_tensor(self, meta: TensorMeta) -> Tensor | None:
        """Flat uint8 memory of `meta.nbytes` for a tensor of the direct lane; None likewise."""
        ...

    def holds(self, name: str) -> bool:
        """Whether `write` does anything with this name."""
        ...


# policy and generation ------------------------------------------------------------------------------
