"""Watches of single keys, all on one stream, for every thread of the process.

A watch is one-shot: it wakes its waiter when the key is deleted (or written) after a revision, and also
whenever that can no longer be known. The waiter asks the server then; a wake-up carries no authority.
When the stream ends, each watch is taken up again from the revision that it started at, so that nothing
is missed in between.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from ._etcd_link import PAUSE_S, Link
from ._etcd_wire import grpc, rpc

log = logging.getLogger("dprims.etcd")


class Watch:
    """One waiter's interest in one key. *revision* is the first at which a change counts."""

    __slots__ = ("deleted", "key", "revision", "stream_id", "wake")

    def __init__(self, key: bytes, revision: int, wake: Callable[[], object], *, deleted: bool) -> None:
        self.key = key
        self.revision = revision
        self.wake = wake
        self.deleted = deleted
        self.stream_id: int | None = None

    @property
    def request(self) -> Any:
        """What starts it at the server: the other kind of event is filtered there."""
        kind = rpc.WatchCreateRequest.NOPUT if self.deleted else rpc.WatchCreateRequest.NODELETE
        create = rpc.WatchCreateRequest(key=self.key, start_revision=self.revision, filters=[kind])
        return rpc.WatchRequest(create_request=create)


class WatchHub:
    """The watches of one process on one cluster; its thread starts with the first of them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._changed = threading.Condition()
        self._watches: set[Watch] = set()
        self._started: dict[int, Watch] = {}
        self._starting: deque[Watch] = deque()  # the server answers in the order of the requests
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._call: Any = None
        self._thread: threading.Thread | None = None
        self._closed = False
        link.on_move = self._restart

    @contextmanager
    def watching(self, watches: Sequence[Watch]) -> Iterator[None]:
        """Keep *watches* alive for a ``with`` block."""
        with self._changed:
            self._watches.update(watches)
            if self._call is not None:
                for watch in watches:
                    self._start(watch)
            elif self._closed:
                self._wake_all()
            elif self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dprims-etcd-watch", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                for watch in watches:
                    self._end(watch)

    def close(self) -> None:
        """End the stream and its thread, and every wait."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._wake_all()
            self._changed.notify()
        self._restart()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _wake_all(self) -> None:
        for watch in self._watches:
            watch.wake()

    def _start(self, watch: Watch) -> None:
        watch.stream_id = None
        self._starting.append(watch)
        self._requests.put(watch.request)

    def _end(self, watch: Watch) -> None:
        self._watches.discard(watch)
        if watch.stream_id is not None and self._started.pop(watch.stream_id, None) is watch:
            self._cancel(watch.stream_id)

    def _cancel(self, stream_id: int) -> None:
        request = rpc.WatchCancelRequest(watch_id=stream_id)
        self._requests.put(rpc.WatchRequest(cancel_request=request))

    def _restart(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wanted():
            endpoint = self._link.endpoint
            try:
                metadata = self._link.metadata(endpoint, self._link.timeout)
                for response in self._open(endpoint, metadata):
                    self._take(response)
                reason = "the server ended the stream"
            except grpc.RpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self._link.forget_token()
            except ValueError:  # grpc's word for a closed channel
                reason = "the channel is closed"
            with self._changed:
                self._call = None
                self._requests.put(None)  # ends the thread in which grpc reads them
                if not self._closed:
                    log.info("etcd: watches on %s are taken up again: %s", endpoint.name, reason)
                    self._changed.wait(PAUSE_S)
            self._link.leave(endpoint)

    def _wanted(self) -> bool:
        """Wait for a watch to keep; False when there will be none."""
        with self._changed:
            while not self._watches and not self._closed:
                self._changed.wait()
            return not self._closed

    def _open(self, endpoint: Any, metadata: Any) -> Any:
        with self._changed:
            self._requests = requests = SimpleQueue[Any]()
            self._started.clear()
            self._starting.clear()
            for watch in self._watches:
                self._start(watch)
            self._call = call = endpoint.watch.Watch(iter(requests.get, None), metadata=metadata)
        if self._closed or self._link.endpoint is not endpoint:  # that was too early for _restart to see
            call.cancel()
        return call

    def _take(self, response: Any) -> None:
        with self._changed:
            if response.created:
                watch = self._starting.popleft()
                self._created(watch, response)
            elif response.canceled:
                cancelled = self._started.pop(response.watch_id, None)
                if cancelled is not None:  # its history is gone
                    cancelled.wake()
            elif response.events:
                found = self._started.get(response.watch_id)
                if found is not None:
                    found.wake()

    def _created(self, watch: Watch, response: Any) -> None:
        if response.canceled:  # refused: its waiter may read the key, so it is our token that ran out
            self._link.forget_token()
            watch.wake()
            self._restart()
            return
        if watch not in self._watches:
            self._cancel(response.watch_id)
            return
        watch.stream_id = response.watch_id
        self._started[response.watch_id] = watch
        if response.header.revision < watch.revision - 1:  # a server that has forgotten what we saw
            watch.wake()
