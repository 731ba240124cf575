"""etcd's API as the backend uses it: the requests, and the names of keys.

Everything stands under one prefix, locks apart from cells. A place in the queue of a lock is a key
``<prefix>/lock/<name> NUL <id>``; as names are printable, NUL ends a name in a way that no name can
imitate, and keys sort and share prefixes as the names do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dprims.backend import need

from ._etcd3_shim import load_etcdrpc

grpc: Any = need("grpc", "etcd")
rpc: Any = load_etcdrpc()


class Keys:
    """Where locks and cells stand in etcd's one flat key space."""

    def __init__(self, prefix: str) -> None:
        self._locks = f"{prefix}/lock/".encode()
        self._cells = f"{prefix}/cell/".encode()

    def queue(self, name: str) -> bytes:
        """What the keys of all places in the queue of *name*, and no others, start with."""
        return self._locks + name.encode() + b"\0"

    def locks(self, prefix: str) -> bytes:
        """What the keys of all locks whose names start with *prefix* start with."""
        return self._locks + prefix.encode()

    def name(self, key: bytes) -> str:
        """The name of the lock in whose queue *key* is a place."""
        return key[len(self._locks) :].rpartition(b"\0")[0].decode()

    def cell(self, key: str) -> bytes:
        """The key of a cell."""
        return self._cells + key.encode()


def read(key: bytes, *, keys_only: bool = False) -> Any:
    """Read one key."""
    return rpc.RangeRequest(key=key, keys_only=keys_only)


def read_all(prefix: bytes) -> Any:
    """Read every key that starts with *prefix*, the oldest first."""
    return rpc.RangeRequest(
        key=prefix,
        range_end=prefix_end(prefix),
        sort_target=rpc.RangeRequest.CREATE,
        sort_order=rpc.RangeRequest.ASCEND,
    )


def read_first(prefix: bytes) -> Any:
    """Read the oldest key that starts with *prefix*."""
    request = read_all(prefix)
    request.limit = 1
    return request


def read_newest(prefix: bytes, count: int, *, before: int = 0) -> Any:
    """Read the names of the *count* newest keys under *prefix*: of those older than revision *before*."""
    return rpc.RangeRequest(
        key=prefix,
        range_end=prefix_end(prefix),
        sort_target=rpc.RangeRequest.CREATE,
        sort_order=rpc.RangeRequest.DESCEND,
        max_create_revision=max(before - 1, 0),
        limit=count,
        keys_only=True,
    )


def put(key: bytes, value: bytes, *, lease: int = 0) -> Any:
    """Write one key."""
    return rpc.PutRequest(key=key, value=value, lease=lease)


def delete(key: bytes) -> Any:
    """Delete one key."""
    return rpc.DeleteRangeRequest(key=key)


def txn(*requests: Any, when: Any = None, otherwise: Sequence[Any] = ()) -> Any:
    """Do *requests* in one step if the comparison *when* holds, and *otherwise* those if not."""
    return rpc.TxnRequest(
        compare=[when] if when is not None else [],
        success=[_operation(request) for request in requests],
        failure=[_operation(request) for request in otherwise],
    )


def created_at(key: bytes, revision: int) -> Any:
    """Compare: *key* was created at *revision*; 0 means it is not there."""
    return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)


def value_is(key: bytes, value: bytes) -> Any:
    """Compare: *key* is there with this *value*."""
    return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=value)


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with *prefix*, which never ends with byte 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _operation(request: Any) -> Any:
    if isinstance(request, rpc.RangeRequest):
        return rpc.RequestOp(request_range=request)
    if isinstance(request, rpc.PutRequest):
        return rpc.RequestOp(request_put=request)
    return rpc.RequestOp(request_delete_range=request)
