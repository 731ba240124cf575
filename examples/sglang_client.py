"""Refits of SGLang servers: the calls that they publish, and what a trainer has to do beside them.

    python examples/sglang_client.py --server http://h1:30000 --server http://h2:30000 --weights FILE

SGLang's receiving side is its own, so what dprims promises of its receivers (staging, digests, one decision
for all) does not hold here. What does: every wait has a bound, a server that fails is named and left out, and
a server serves again only when it has every tensor of the version. Each server has a weight group of its own
with the trainer: SGLang cannot be told to give up a receive, so a group over all servers would hang them all
when one of them dies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from dprims import DprimsError, PeerLost, RefitError
from dprims.synchronizer import SafetensorsSource, WeightSource
from dprims.synchronizer.guard import CancelFlag, Guard
from dprims.synchronizer.rendezvous import leader_store

T = TypeVar("T")

_numbers = itertools.count(1)


class SglangServer:
    """One SGLang server: the HTTP calls that a refit needs, each bounded by *timeout_s* seconds.

    *ranks* is its tensor-parallel size; data-parallel servers refuse these calls. Methods block, and
    raise PeerLost when the server does not answer, RefitError with its words when it refuses.
    """

    def __init__(
        self, url: str, *, ranks: int = 1, timeout_s: float = 120.0, api_key: str | None = None
    ) -> None:
        self.url, self.ranks, self.timeout_s = url.rstrip("/"), ranks, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def init_group(self, host: str, port: int, name: str, backend: str) -> None:
        """Join the group *name* as its ranks 1 to *ranks*; the trainer, at *host*:*port*, is rank 0."""
        self._post(
            "init_weights_update_group",
            master_address=host,
            master_port=port,
            rank_offset=1,
            world_size=1 + self.ranks,
            group_name=name,
            backend=backend,
        )

    def destroy_group(self, name: str) -> None:
        """Leave the group."""
        self._post("destroy_weights_update_group", group_name=name)

    def pause(self, mode: str) -> None:
        """Stop generating: ``abort`` ends requests, ``retract`` puts them back in the queue."""
        self._post("pause_generation", mode=mode)

    def begin(self) -> None:
        """Open a session of updates; the server refuses updates outside of one."""
        self._post("begin_weight_update")

    def receive(self, tensors: Sequence[tuple[str, Tensor]], group: str) -> None:
        """Take these tensors from the group, in this order; returns when they are loaded."""
        self._post(
            "update_weights_from_distributed",
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            group_name=group,
            flush_cache=False,  # once is enough: at the end
        )

    def end(self) -> None:
        """Close the session: quantised weights are finished here."""
        self._post("end_weight_update")

    def publish(self, version: int) -> None:
        """Forget what was cached under the old weights, and say which version this is now."""
        self._post("flush_cache?timeout=10")
        self._post("update_weight_version", new_version=str(version), abort_all_requests=False)

    def resume(self) -> None:
        """Generate again."""
        self._post("continue_generation")

    def _post(self, path: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), self._headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            raise RefitError(f"{self.url}/{path}: {error.code}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise PeerLost(f"{self.url}/{path}: {error}") from error
        answer = json.loads(text) if text.startswith(b"{") else {}
        if answer.get("success") is False:
            raise RefitError(f"{self.url}/{path}: {answer.get('message')}")

    def __repr__(self) -> str:
        return self.url


@dataclass
class _Link:
    """The trainer's end of one server's weight group."""

    server: SglangServer
    name: str = ""
    group: Any = None
    store: Any = None
    """Served by this process, for as long as the group lives."""
    flying: list[Any] = field(default_factory=list)
    """Works and their tensors: what an abandoned broadcast may still read."""


@dataclass(frozen=True)
class Outcome:
    """What came of a refit."""

    version: int
    serving: list[str]
    """The servers that serve this version now."""
    lost: Mapping[str, str]
    """The servers that do not, and why. They are paused, torn or gone: start them anew."""
    nbytes: int
    seconds: float


class SglangRefit:
    """The trainer's part: rank 0 of each server's weight group. Use it from one thread.

    *source* is read once a refit, front to back; its tensors are on *device*. A refit ends within *timeout_s*
    seconds for each of its steps, or names who did not.
    """

    def __init__(
        self,
        source: WeightSource,
        servers: Iterable[SglangServer],
        *,
        host: str | None = None,
        device: str = "cpu",
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 120.0,
        pause_mode: str = "retract",
    ) -> None:
        self.source, self.device = source, torch.device(device)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._host, self._timeout_s, self._bucket_bytes = host, timeout_s, bucket_bytes
        self._pause_mode = pause_mode
        self._links = [_Link(server) for server in servers]
        self._lost: dict[str, str] = {}

    def add(self, server: SglangServer) -> None:
        """Take in a server, such as one that was started anew; the next refit connects to it."""
        self._links.append(_Link(server))

    def refit(self, version: int) -> Outcome:
        """Send the weights to every server, and have those that got all of them serve.

        Raises RefitError when no server is left; what the source raises is raised when all have unwound.
        """
        began = time.monotonic()
        self._lost = {}
        self._on_all(self._connect)
        self._on_all(lambda link: link.server.pause(self._pause_mode))
        self._on_all(lambda link: link.server.begin())
        nbytes = 0
        try:
            for bucket in self._buckets():
                nbytes += sum(tensor.nbytes for _, tensor in bucket)
                self._send(bucket)
                if not self._links:
                    break
        except BaseException:
            self._on_all(lambda link: self._drop(link, "the source failed in the middle"))
            raise
        self._on_all(lambda link: link.server.end())
        self._on_all(lambda link: link.server.publish(version))
        self._on_all(lambda link: link.server.resume())  # only now: it has everything
        if not self._links:
            raise RefitError(f"no server took version {version}: {self._lost}")
        serving = [link.server.url for link in self._links]
        return Outcome(version, serving, dict(self._lost), nbytes, time.monotonic() - began)

    def close(self) -> None:
        """Leave every group. Bounded; servers go on serving what they have."""
        self._on_all(lambda link: self._leave(link))
        self._links = []

    # -- the weights --------------------------------------------------------------------------------------

    def _buckets(self) -> Iterable[list[tuple[str, Tensor]]]:
        """Whole tensors, as many as fit; a larger one alone. SGLang has no chunks."""
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in self.source:
            if bucket and sum(one.nbytes for _, one in bucket) + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket = []
            bucket.append((name, tensor.contiguous()))
        if bucket:
            yield bucket

    def _send(self, bucket: list[tuple[str, Tensor]]) -> None:
        """The call that makes a server receive, and beside it the broadcasts that it receives."""

        def send(link: _Link) -> None:
            cancel = CancelFlag()
            guard = Guard(cancel, time.monotonic() + self._timeout_s, what=f"sending to {link.server}")
            asked = _thread(lambda: link.server.receive(bucket, link.name))
            asked.add_done_callback(lambda done: done.exception() and cancel.set(str(done.exception())))
            for name, tensor in bucket:
                guard.progress(name)
                work = link.group.broadcast([tensor], torch.distributed.BroadcastOptions())
                link.flying.append((work, tensor))
                guard.wait(self._marked(work))
            wait([asked], guard.remaining(self._timeout_s))
            guard.check()
            asked.result(0)  # loaded
            link.flying.clear()

        self._on_all(send)

    def _marked(self, work: Any) -> Any:
        """What the guard can wait for: on CUDA an event behind the work, which never blocks the host."""
        if self.device.type != "cuda":
            return work
        work.wait()
        event = torch.cuda.Event()
        event.record()
        return event

    # -- the groups ---------------------------------------------------------------------------------------

    def _connect(self, link: _Link) -> None:
        """Build the group, once. Its name is never used again: torch knows every name only once."""
        from torch.distributed.distributed_c10d import (
            Backend,
            PrefixStore,
            _new_process_group_helper,
            _world,
        )

        if link.group is not None:
            return
        server, name = link.server, f"dprims-{id(self):x}-{next(_numbers)}"
        guard = Guard(deadline=time.monotonic() + self._timeout_s, what=f"connecting to {server}")
        store, host, port = leader_store(self._host)
        joined = _thread(lambda: server.init_group(host, port, name, self.backend))
        joined.add_done_callback(lambda one: one.exception() and guard.cancel.set(str(one.exception())))

        def join() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            # what SGLang itself calls: only so are the keys of both sides in the store the same
            group, _ = _new_process_group_helper(
                1 + server.ranks,
                0,
                [],
                Backend(self.backend),
                PrefixStore(name, store),
                group_name=name,
                timeout=timedelta(seconds=self._timeout_s),
            )
            _world.pg_group_ranks[group] = {rank: rank for rank in range(1 + server.ranks)}
            return group

        group = guard.call(join, f"the group {name}")
        wait([joined], guard.remaining(self._timeout_s))
        guard.check()
        joined.result(0)
        link.name, link.group, link.store = name, group, store

    def _leave(self, link: _Link) -> None:
        if link.group is None:
            return
        link.server.destroy_group(link.name)
        torch.distributed.destroy_process_group(link.group)

    def _drop(self, link: _Link, why: str) -> None:
        """This server takes no further part. It stays paused, so it serves nothing."""
        self._lost[link.server.url] = why
        self._links = [one for one in self._links if one is not link]
        if (
            self.backend == "nccl" and link.group is not None
        ):  # gloo has no abort: what flies keeps its tensors until torch's timeout
            _thread(link.group.abort)
        _abandoned.append(link)

    # -- all at once --------------------------------------------------------------------------------------

    def _on_all(self, step: Callable[[_Link], object]) -> None:
        """The same step on every server, beside each other; whoever fails in it is left out."""
        links = list(self._links)
        if not links:
            return
        with ThreadPoolExecutor(len(links)) as pool:
            errors = [future.exception() for future in [pool.submit(step, link) for link in links]]
        for link, error in zip(links, errors, strict=True):
            if isinstance(error, DprimsError | RuntimeError):  # of dprims, or of torch
                self._drop(link, str(error))
            elif error is not None:
                raise error


_abandoned: list[_Link] = []
"""Groups that were given up: freeing one would wait for what is stuck in it."""


def _thread(call: Callable[[], T]) -> Future[T]:
    """Run something that may block on a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is the outcome
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def main() -> None:
    """Send a safetensors file, whose names are those of its model on Hugging Face, to some servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="URL")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel size of each server")
    parser.add_argument("--weights", required=True, help="a safetensors file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--version", type=int, default=1)
    arguments = parser.parse_args()
    try:
        source = SafetensorsSource(arguments.weights, device=arguments.device)
        servers = [SglangServer(url, ranks=arguments.ranks) for url in arguments.server]
        refit = SglangRefit(source, servers, device=arguments.device)
        outcome = refit.refit(arguments.version)
    except RefitError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"version {outcome.version}, {outcome.nbytes / 1e9:.2f} GB, {outcome.seconds:.2f} s")
    print(f"serving: {', '.join(outcome.serving)}")
    for url, why in outcome.lost.items():
        print(f"lost: {url}: {why}")
    refit.close()


if __name__ == "__main__":
    main()
