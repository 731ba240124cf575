"""A vLLM server as a shard of dprims: refits that are staged, committed on all shards or none, and survive.

    export DPRIMS_BACKEND=redis://h:6379/0 VLLM_SERVER_DEV_MODE=1 PYTHONPATH=examples
    vllm serve MODEL --worker-extension-cls vllm_worker.RefitWorker
    python examples/vllm_worker.py --url http://127.0.0.1:8000 --shard 0 --shard-sizes 1,1

The last line joins the server to the fleet, as the first of two with one GPU each.

vLLM adds the methods of `RefitWorker` to each of its workers; `/collective_rpc` calls them. A worker that has
joined is a generation rank like any other: it receives into staging while the engine serves. Once the fleet
has decided to commit, rank 0 of the server has vLLM pause, every rank loads, the caches that the old weights
filled are dropped, and vLLM resumes. The trainers' side is `SpmdRefit` (docs/refits-spmd.md).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlencode

import torch
from torch import Tensor

from dprims import PeerLost, RefitError
from dprims.engines.spmd import SpmdReceiver
from dprims.synchronizer import LoadWeightsSink

PAUSE_MODES = ("abort", "wait", "keep")


class VllmServer:
    """The HTTP calls of one vLLM server that a commit needs, each bounded by *timeout_s* seconds."""

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s

    def pause(self, mode: str) -> None:
        """Stop generating. RefitError when the server sleeps: its weights are not where they were."""
        if self.call("GET", "is_sleeping")["is_sleeping"]:
            raise RefitError(f"{self.url} is asleep: wake it up before weights can be committed")
        self.call("POST", "pause", mode=mode, clear_cache="true")

    def publish(self, version: int, *, running: bool) -> None:
        """Drop what the old weights cached, of *running* requests too; say which version this is."""
        reset = self.call("POST", "reset_prefix_cache", reset_running_requests="true" if running else "false")
        if not reset["success"]:
            raise RefitError(f"{self.url} could not reset its prefix cache: requests still hold blocks of it")
        self.call("POST", "update_weight_version", body={"new_version": str(version)})

    def resume(self) -> None:
        """Generate again."""
        self.call("POST", "resume")

    def call(self, method: str, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        """One call. PeerLost when nothing answers, RefitError when the server refuses."""
        where = f"{self.url}/{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(where, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            raise RefitError(f"{where}: {error.code}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise PeerLost(f"{where}: {error}") from error
        found: dict[str, Any] = json.loads(text) if text else {}
        return found


class EngineSink(LoadWeightsSink):
    """One worker's weights. *server* is given to one rank of each server: it pauses for all of them."""

    def __init__(
        self,
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any],
        *,
        device: torch.device,
        server: VllmServer | None,
        pause_mode: str,
    ) -> None:
        super().__init__(load_weights, device=device)
        self.server, self.pause_mode = server, pause_mode

    def pause(self) -> None:
        """All ranks of a shard pause before any commits, so one call to the server is enough."""
        if self.server is not None:
            self.server.pause(self.pause_mode)

    def commit(self, version: int) -> None:
        """Load what is staged. It is live when this returns, on whatever stream vLLM computes."""
        cuda = self._device is not None and self._device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self._device)  # this is a thread of its own
        with torch.no_grad():
            super().commit(version)
        if cuda:
            torch.cuda.synchronize()

    def after_commit(self) -> None:
        """Every rank of the shard has loaded."""
        if self.server is not None and self.version is not None:
            self.server.publish(self.version, running=self.pause_mode == "keep")

    def resume(self) -> None:
        """Serve the new version."""
        if self.server is not None:
            self.server.resume()


class RefitWorker:
    """What vLLM adds to its worker class: pass ``--worker-extension-cls vllm_worker.RefitWorker``.

    No method blocks, since vLLM's worker computes nothing while it runs one. Arguments may be strings, as all
    that comes through ``/collective_rpc`` is.
    """

    def dprims_join(
        self,
        url: str,
        shard: int | str,
        shard_sizes: str,
        backend: str = "",
        fleet: str = "refit",
        pause_mode: str = "wait",
        roster_ttl_s: float | str = 5.0,
    ) -> str:
        """Become a generation rank of *fleet*, on a thread: trainers may come later.

        *url* is this server's own, *shard* its number among *shard_sizes* (``"2,2"``: ranks of each server,
        tensor, pipeline and data parallel together). *backend* is by default ``$DPRIMS_BACKEND``.
        """
        if pause_mode not in PAUSE_MODES:
            raise RefitError(f"pause_mode is {pause_mode!r}; expected one of {', '.join(PAUSE_MODES)}")
        backend = backend or os.environ.get("DPRIMS_BACKEND", "")
        if not backend:
            raise RefitError("no backend was given, and DPRIMS_BACKEND is not set")
        if getattr(self, "_dprims", None) is not None:
            raise RefitError("this worker has joined already; call dprims_leave first")
        worker: Any = self
        parallel = worker.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + worker.rank
        sink = EngineSink(
            # not the model's load_weights alone: this restores weights that vLLM has laid out anew, too
            lambda pairs: worker.reload_weights(weights_iterator=pairs),
            device=worker.device,
            server=VllmServer(url) if rank == 0 else None,
            pause_mode=pause_mode,
        )
        self._dprims = _Joining(
            sink,
            backend=backend,
            shard=int(shard),
            shard_sizes=tuple(map(int, shard_sizes.split(","))),
            worker=rank,
            fleet=fleet,
            roster_ttl_s=float(roster_ttl_s),
            device=worker.device,
        )
        return f"rank {rank} of shard {shard} is joining"

    def dprims_status(self) -> dict[str, Any]:
        """Whether this rank has joined, its version, and whether it may serve; route no request if not."""
        joining: _Joining | None = getattr(self, "_dprims", None)
        if joining is None:
            return {"joined": False, "version": 0, "may_serve": False, "error": ""}
        return joining.status()

    def dprims_leave(self) -> None:
        """Take no further part; the engine goes on with the weights that it has."""
        joining: _Joining | None = getattr(self, "_dprims", None)
        self._dprims = None
        if joining is not None:
            joining.close()

    def destroy_worker_extension(self) -> None:
        """Called by vLLM before the worker ends."""
        self.dprims_leave()


class _Joining:
    """A receiver that is being made, or is there, or could not be made."""

    def __init__(self, sink: EngineSink, **how: Any) -> None:
        self._receiver: SpmdReceiver | None = None
        self._error = ""
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._join, args=(sink, how), name="dprims-join", daemon=True).start()

    def _join(self, sink: EngineSink, how: dict[str, Any]) -> None:
        try:
            receiver = SpmdReceiver(sink, **how)
        except Exception as error:  # noqa: BLE001 - dprims_status says it
            self._error = f"{type(error).__name__}: {error}"
            return
        with self._lock:
            self._receiver = receiver
        if self._closed:
            receiver.close()

    def status(self) -> dict[str, Any]:
        receiver = self._receiver
        return {
            "joined": receiver is not None,
            "version": 0 if receiver is None else receiver.version,
            "may_serve": receiver is not None and receiver.may_serve,
            "error": self._error,
        }

    def close(self) -> None:
        self._closed = True
        with self._lock:
            receiver = self._receiver
        if receiver is not None:
            receiver.close()


def main() -> None:
    """Join a server that runs to the fleet, and print what its workers answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", required=True, help="of the vLLM server")
    parser.add_argument("--shard", required=True, type=int, help="its number in the fleet")
    parser.add_argument("--shard-sizes", required=True, help="ranks of every server of the fleet, as 2,2")
    parser.add_argument("--backend", default="", help="by default the servers' $DPRIMS_BACKEND")
    parser.add_argument("--pause-mode", choices=PAUSE_MODES, default="wait")
    arguments = parser.parse_args()
    how = {name: str(value) for name, value in vars(arguments).items()}
    try:
        answer = VllmServer(arguments.url).call(
            "POST", "collective_rpc", body={"method": "dprims_join", "kwargs": how}
        )
    except RefitError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print("\n".join(answer["results"]))


if __name__ == "__main__":
    main()
