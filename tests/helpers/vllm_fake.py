"""A vLLM server as far as a worker extension sees one, with what vLLM 0.33 refuses.

Each worker is a process, into whose class the extension is put as vLLM puts it; the HTTP front is a thread of
this process. There is no model: ``generate`` answers with a digest of the weights.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch

from dprims.engines.process import WorkerProcess

from .sglang_fake import digest


class Worker:
    """The attributes and methods of vLLM's GPU worker that an extension may use or must not hide."""

    def __init__(self, rank: int, world_size: int, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self.rank, self.local_rank = rank, rank
        self.device = torch.device("cpu")
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=world_size)
        )
        self.weights = {
            name: torch.full(shape, -1.0).to(getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()
        }
        self.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights))
        self.paused = False
        self.loaded_while_running = 0

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """As vLLM's: the model's load_weights, between laying weights back and laying them out again."""
        if weights_iterator is None or weights_path is not None or not is_checkpoint_format:
            raise ValueError("the fake has no weights on disk, and no kernel format")
        self.model_runner.model.load_weights(weights_iterator)

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.loaded_while_running += not self.paused
        loaded = set()
        for name, tensor in weights:
            held = self.weights.get(name)
            if held is None:
                raise KeyError(f"there is no parameter {name}")
            if held.shape != tensor.shape or held.dtype != tensor.dtype:
                raise AssertionError(f"{name} is {tensor.dtype}{list(tensor.shape)}")
            held.copy_(tensor)
            loaded.add(name)
        return loaded

    # names that vLLM's worker has: an extension that defines one of them is refused
    def init_device(self) -> None: ...
    def load_model(self) -> None: ...
    def execute_model(self, scheduler_output: Any) -> None: ...
    def sleep(self, level: int = 1) -> None: ...
    def wake_up(self, tags: list[str] | None = None) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def finish_weight_update(self) -> None: ...
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def shutdown(self) -> None: ...


class WorkerWrapper:
    """What lives in a worker's process: vLLM's wrapper, which puts the extension into the worker's class."""

    def __init__(self, extension: str, folder: str, *args: Any) -> None:
        sys.path.insert(0, folder)
        module, _, name = extension.rpartition(".")
        self._extension = getattr(importlib.import_module(module), name)
        for attribute in dir(self._extension):
            if not attribute.startswith("__") and hasattr(Worker, attribute):
                raise AssertionError(f"the worker has an attribute {attribute} already")
        extended: Any = type("ExtendedWorker", (Worker, self._extension), {})
        self.worker = extended(*args)
        hook = getattr(self._extension, "init_worker_extension", None)
        if hook is not None:
            hook(self.worker)

    def rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return getattr(self.worker, method)(*args, **(kwargs or {}))

    def pause(self, paused: bool) -> None:
        self.worker.paused = paused

    def held(self) -> tuple[str, int]:
        return digest(self.worker.weights), self.worker.loaded_while_running

    def shutdown(self) -> None:
        hook = getattr(self._extension, "destroy_worker_extension", None)
        if hook is not None:
            hook(self.worker)


class FakeVllm:
    """A server with its workers. ``calls`` are the paths that were asked, in order."""

    def __init__(
        self,
        extension: str,
        folder: str,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        *,
        ranks: int = 1,
    ) -> None:
        self.calls: list[str] = []
        self.sleeping = self.paused = False
        self.version = "default"
        self.running = 1
        """Requests that hold blocks of the prefix cache."""
        self.workers = [
            WorkerProcess(f"vllm-{rank}", WorkerWrapper, (extension, folder, rank, ranks, shapes))
            for rank in range(ranks)
        ]
        for worker in self.workers:
            worker.ready.result(60)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def on_all(self, method: str, *args: Any) -> list[Any]:
        return [one.result(30) for one in [worker.call(method, *args) for worker in self.workers]]

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, dict[str, Any]]:
        """What a call is answered: its status and its JSON."""
        self.calls.append(path)
        try:
            route = getattr(self, f"{method}_{path}")
        except AttributeError:
            return 404, {"detail": "Not Found"}
        try:
            return 200, route(query, body) or {}
        except (KeyError, ValueError) as error:
            return 400, {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - as a server does
            return 500, {"error": f"{type(error).__name__}: {error}"}

    def GET_is_sleeping(self, query: dict[str, str], body: Any) -> dict[str, Any]:
        return {"is_sleeping": self.sleeping}

    def POST_pause(self, query: dict[str, str], body: Any) -> dict[str, Any]:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep") or query.get("clear_cache", "true") not in ("true", "false"):
            raise ValueError(f"wrong query {query}")
        self.paused = True
        self.running = self.running if mode == "keep" else 0
        self.on_all("pause", True)
        return {"status": "paused"}

    def POST_resume(self, query: dict[str, str], body: Any) -> dict[str, Any]:
        self.paused, self.running = False, 1
        self.on_all("pause", False)
        return {"status": "resumed"}

    def POST_reset_prefix_cache(self, query: dict[str, str], body: Any) -> dict[str, Any]:
        if query.get("reset_running_requests", "false") == "true":
            self.running = 0
        return {"success": not self.running}

    def POST_update_weight_version(self, query: dict[str, str], body: Any) -> dict[str, Any]:
        if not isinstance(body["new_version"], str):
            raise ValueError("new_version is no string")
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    def POST_collective_rpc(self, query: dict[str, str], body: Any) -> dict[str, Any]:
        args, kwargs = body.get("args", []), body.get("kwargs", {})
        if not all(isinstance(value, str) for value in [*args, *kwargs.values()]):
            raise ValueError("only strings pass through /collective_rpc")
        results = self.on_all("rpc", body["method"], tuple(args), kwargs)
        return {"results": [r if r is None or isinstance(r, dict | list) else str(r) for r in results]}

    def generate(self) -> tuple[str, set[str]]:
        """Version and digests of the weights that a request would see."""
        assert not self.paused
        return self.version, {held for held, _ in self.on_all("held")}

    def status(self) -> list[dict[str, Any]]:
        body = json.dumps({"method": "dprims_status"}).encode()
        with urllib.request.urlopen(f"{self.url}/collective_rpc", body, timeout=30) as reply:
            found: list[dict[str, Any]] = json.loads(reply.read())["results"]
            return found

    def close(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.call("shutdown").exception(30)
            worker.kill()
        self._http.shutdown()
        self._http.server_close()


def _handler(server: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            where = urlsplit(self.path)
            body = json.loads(text) if text else None
            status, answer = server.answer(
                self.command, where.path.strip("/"), dict(parse_qsl(where.query)), body
            )
            reply = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)
            except OSError:  # who asked has given up
                pass

        do_GET = do_POST = _do

        def log_message(self, *_: object) -> None:
            pass

    return Handler
