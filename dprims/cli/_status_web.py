"""``dprims status --web``: one page and ``/status.json``, over the standard library's HTTP server.

Read-only. A fixed number of threads serve; what is beyond them waits for a moment and is then turned away.
However many pages watch, the backend is looked at once an interval.
"""

from __future__ import annotations

import ipaddress
import json
import math
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import typer

from ..exceptions import DprimsError
from ..status import Observer

THREADS = 8
WAITING = 32
"""How many connections may wait for a thread."""
CLIENT_S = 10.0
"""How long a client may take to send its request, and how long to read the answer."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Looks:
    """What the page asks for: the newest snapshot, at most one look an interval."""

    def __init__(self, observer: Observer, interval: float) -> None:
        self._observer = observer
        self.interval = interval
        self._lock = threading.Lock()
        self._answer: tuple[HTTPStatus, bytes] | None = None
        self._due = 0.0

    def answer(self) -> tuple[HTTPStatus, bytes]:
        """Status and body of ``/status.json``."""
        with self._lock:
            if self._answer is None or time.monotonic() >= self._due:
                self._answer = self._look()
                self._due = time.monotonic() + self.interval * 0.9  # a page that polls finds a new one
            return self._answer

    def _look(self) -> tuple[HTTPStatus, bytes]:
        try:
            data = self._observer.look().to_json()
            return HTTPStatus.OK, json.dumps({**data, "interval_s": self.interval}).encode()
        except DprimsError as error:
            said = {"error": type(error).__name__, "message": " ".join(str(error).split())}
            return HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(said).encode()


class StatusServer(HTTPServer):
    """Serves the page at *host* and *port* (0: a free one) between :meth:`start` and :meth:`close`."""

    allow_reuse_address = True
    request_queue_size = WAITING

    def __init__(self, observer: Observer, host: str, port: int, interval: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.looks = Looks(observer, interval)
        self.page = Path(__file__).with_name("_status.html").read_bytes()
        self._connections: queue.Queue[tuple[Any, Any] | None] = queue.Queue(WAITING)
        self._threads: list[threading.Thread] = []
        self._guard = threading.Lock()
        self._deadlines: dict[Any, float] = {}
        """Of each connection that a thread serves: when it is shut down."""
        self._closing = False
        super().__init__((host, port), _Handler)
        self.is_local = _is_loopback(self.server_name)

    @property
    def url(self) -> str:
        """Where the page is."""
        host = self.server_name
        return f"http://[{host}]:{self.server_port}/" if ":" in host else f"http://{host}:{self.server_port}/"

    def start(self) -> None:
        """Serve on threads of its own."""
        targets = [self._work] * THREADS + [lambda: self.serve_forever(poll_interval=0.1)]
        self._threads = [threading.Thread(target=one, name="dprims-web", daemon=True) for one in targets]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening, shut all connections down, and end the threads."""
        self.shutdown()
        self.server_close()
        with self._guard:
            self._closing = True
            for request in self._deadlines:
                _shut_down(request)
        for _ in range(THREADS):
            self._connections.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def server_bind(self) -> None:
        """Bind; the base class would ask a name server for this host's name as well."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hand a connection to a thread, or turn it away."""
        try:
            self._connections.put_nowait((request, client_address))
        except queue.Full:
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Shut down the connections whose time is over; called several times a second."""
        now = time.monotonic()
        with self._guard:
            for request, deadline in self._deadlines.items():
                if now >= deadline:
                    _shut_down(request)

    def limit(self, request: Any, seconds: float) -> bool:
        """Give a connection so many seconds from now; False when the server closes."""
        with self._guard:
            self._deadlines[request] = time.monotonic() + seconds
            return not self._closing

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's business."""

    def _work(self) -> None:
        while (connection := self._connections.get()) is not None:
            request, client_address = connection
            try:
                if self.limit(request, CLIENT_S):
                    self.finish_request(request, client_address)
            except Exception:  # noqa: BLE001 - this connection's; the thread serves the next one
                self.handle_error(request, client_address)
            finally:
                with self._guard:
                    del self._deadlines[request]
                self.shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = CLIENT_S
    server_version = "dprims"
    sys_version = ""
    _PATHS: ClassVar[Sequence[str]] = ("/", "/status.json")

    def do_GET(self) -> None:
        self.server.limit(self.connection, math.inf)  # the backend's time is not the client's
        # a page of elsewhere whose name was made to mean loopback must not read from here
        if self.server.is_local and not _names_loopback(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, b"this address is for this host alone\n", "text/plain")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif path == "/status.json":
            status, body = self.server.looks.answer()
            self._send(status, body, "application/json")
        else:
            known = " and ".join(self._PATHS)
            self._send(HTTPStatus.NOT_FOUND, f"there are {known}\n".encode(), "text/plain")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.server.limit(self.connection, CLIENT_S)
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are no events."""


def serve(observer: Observer, host: str, port: int, interval: float) -> None:
    """Serve until interrupted; says where on stdout. Fails at once when the backend cannot be read."""
    observer.look()
    try:
        server = StatusServer(observer, host, port, interval)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host} port {port}: {error.strerror or error}", param_hint="--web"
        ) from None
    if not server.is_local:
        print(f"dprims status: whoever reaches {host} can read this page", file=sys.stderr)
    server.start()
    try:
        print(server.url, flush=True)
        threading.Event().wait()
    finally:
        server.close()


def _shut_down(connection: Any) -> None:
    """Have whoever reads from *connection* or writes to it fail at once."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _is_loopback(host: object) -> bool:
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _names_loopback(header: str) -> bool:
    name = header if header.endswith("]") else header.rpartition(":")[0] or header
    return name in _LOCAL_NAMES or _is_loopback(name.strip("[]"))
