"""A server that takes SGLang's refit calls, and refuses what SGLang 0.5.23 would refuse.

Its HTTP front is a thread of this process; its scheduler ranks are processes, which receive over real
gloo groups, built as SGLang builds them. It has no model: ``generate`` answers with what it holds.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from dprims.engines.process import WorkerProcess
from dprims.synchronizer.packing import raw

FIELDS: dict[str, tuple[dict[str, type], dict[str, type]]] = {
    "init_weights_update_group": (
        {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int},
        {"group_name": str, "backend": str},
    ),
    "destroy_weights_update_group": ({}, {"group_name": str}),
    "pause_generation": ({}, {"mode": str}),
    "continue_generation": ({}, {"torch_empty_cache": bool}),
    "begin_weight_update": ({}, {"selector": str}),
    "end_weight_update": ({}, {}),
    "update_weights_from_distributed": (
        {"names": list, "dtypes": list, "shapes": list},
        {
            "group_name": str,
            "flush_cache": bool,
            "abort_all_requests": bool,
            "weight_version": str,
            "load_format": str,
            "selector": str,
            "torch_empty_cache": bool,
        },
    ),
    "flush_cache": ({}, {}),
    "update_weight_version": ({"new_version": str}, {"abort_all_requests": bool}),
    "generate": ({}, {}),
}
"""The fields of each call that have to be there, and those that may."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + raw(tensor))
    return found.hexdigest()


class Refused(Exception):
    """What the server answers with status 400."""


class SchedulerRank:
    """One tensor-parallel rank: what SGLang's scheduler and weight updater do with a refit's calls."""

    def __init__(self, rank: int, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.shapes = rank, dict(shapes)
        self.weights = {
            name: torch.full(shape, -1.0).to(getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()
        }
        self.groups: dict[str, Any] = {}
        self.paused = self.session = False
        self.mode, self.version, self.running = "", "default", 1

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, **more: str
    ) -> None:
        name, backend = more.get("group_name", "weight_update_group"), more.get("backend", "nccl")
        rank = rank_offset + self.rank
        limit = timedelta(seconds=20)
        host = f"[{master_address}]" if ":" in master_address else master_address
        store, rank, world_size = next(
            rendezvous(f"tcp://{host}:{master_port}", rank, world_size, timeout=limit)
        )
        store.set_timeout(limit)
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,
            timeout=limit,
        )
        _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        self.groups[name] = group

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        if group_name not in self.groups:
            raise Refused("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(group_name))

    def pause_generation(self, mode: str = "abort") -> None:
        if mode not in ("abort", "retract", "in_place"):
            raise Refused(f"no such mode: {mode}")
        self.paused, self.mode = True, mode
        self.running = self.running if mode == "in_place" else 0

    def continue_generation(self, torch_empty_cache: bool = True) -> None:
        self.paused, self.running = False, 1

    def begin_weight_update(self, selector: str = "all") -> None:
        if self.session:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.session = True

    def end_weight_update(self) -> None:
        if not self.session:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        self.session = False

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], **more: Any
    ) -> None:
        if not self.session:
            raise Refused("update_weights_from_distributed must run between begin and end")
        name = more.get("group_name", "weight_update_group")
        if name not in self.groups:
            raise Refused(f"Failed to receive weights: Group {name} not in {list(self.groups)}")
        coming = []
        for tensor, dtype, shape in zip(names, dtypes, shapes, strict=True):
            coming.append((tensor, torch.empty(shape, dtype=getattr(torch, dtype))))
        works = [dist.broadcast(one, src=0, group=self.groups[name], async_op=True) for _, one in coming]
        for work in works:
            work.wait()
        for tensor, one in coming:
            held = self.weights.get(tensor)
            if held is None or held.shape != one.shape or held.dtype != one.dtype:
                said = "nothing" if held is None else f"{held.dtype}{list(held.shape)}"
                raise Refused(
                    f"Failed to update parameter online: {tensor} is {one.dtype}{list(one.shape)}, expected "
                    f"{said}. The full weights of the ModelRunner are partially updated."
                )
            held.copy_(one)
        if more.get("flush_cache", True):
            self.flush_cache()

    def flush_cache(self) -> None:
        if self.running:
            raise Refused("Flush cache failed: requests are running")

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> None:
        self.version = new_version

    def generate(self) -> dict[str, str]:
        if self.paused:
            raise Refused("generation is paused")
        return {"weight_version": self.version, "digest": digest(self.weights)}


class FakeSglang:
    """A server with its ranks. ``calls`` are the paths that were asked, in order."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]], *, ranks: int = 1) -> None:
        self.calls: list[str] = []
        self.before: dict[str, Any] = {}
        """Path -> what to do with this server before it takes the call; done once."""
        self.ranks = [WorkerProcess(f"sglang-{rank}", SchedulerRank, (rank, shapes)) for rank in range(ranks)]
        for rank in self.ranks:
            rank.ready.result(60)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What a call is answered: its status and its JSON."""
        self.calls.append(path)
        needed, optional = FIELDS.get(path, ({}, {}))
        known = needed | optional
        if path not in FIELDS:
            return 404, {"detail": "Not Found"}
        wrong = [name for name, value in body.items() if type(value) is not known.get(name)]
        if wrong or needed.keys() - body.keys():
            return 422, {"detail": f"{path}: wrong {wrong}, missing {sorted(needed.keys() - body.keys())}"}
        act = self.before.pop(path, None)
        if act is not None:
            act(self)
        asked: list[Future[Any]] = [rank.call(path, **body) for rank in self.ranks]
        try:
            results = [one.result(60) for one in asked]
        except Exception as error:  # noqa: BLE001 - it is the answer
            return 400, {"success": False, "message": str(error)}
        return 200, results[0] or {"success": True, "message": "Success"}

    def generate(self) -> dict[str, str]:
        """What a user's request is answered; HTTPError while it is paused."""
        with urllib.request.urlopen(f"{self.url}/generate", b"{}", timeout=30) as reply:
            found: dict[str, str] = json.loads(reply.read())
            return found

    def kill(self) -> None:
        """End its processes, and its front."""
        for rank in self.ranks:
            rank.kill()
        self._http.shutdown()
        self._http.server_close()


def _handler(server: FakeSglang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            status, answer = server.answer(self.path.strip("/").partition("?")[0], body)
            text = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            except OSError:  # who asked has given up
                pass

        def log_message(self, *_: object) -> None:
            pass

    return Handler
