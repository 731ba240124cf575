"""Connections to one Redis server, every use of them bounded.

redis-py and valkey-py bring the protocol, TLS and authentication; their pools and retries are not
used, because they bound no whole operation and hide whether a command may have been applied.
All our commands may be sent twice, so a failed one is simply sent again until its time is up.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any
from urllib.parse import parse_qsl, urlencode

from dprims.backend import boottime, need, split_url
from dprims.exceptions import BackendMisconfigured, BackendUnavailable

from ._redis_scripts import Script
from ._urls import why_not, without_password

TIMEOUT_S = 5.0
"""How long one operation may take, reconnects included, when nothing says otherwise."""

AGAIN_S = 1.0
"""How long one operation may take while the server has not answered the last one."""

MAX_IDLE = 8
"""How many unused connections are kept."""

# What a client's pool knows that is not the connection's business, or that we decide ourselves.
_NOT_OURS = (
    "retry",
    "cache",
    "maint",
    "orig_",
    "oss_",
    "himport",
    "event_dispatcher",
    "max_connections",
    "timeout",
    "health_check_interval",
    "decode_responses",
    "protocol",
    "parser_class",
    "socket_timeout",
    "socket_connect_timeout",
)
# Answers of a server that will answer otherwise soon: starting, failing over, running a long script.
_PASSING = ("LOADING", "READONLY", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN")

CLOSED = "this backend was closed"

Command = tuple[Any, ...]


@dataclass(frozen=True)
class Replies:
    """What came back, when the try that brought it began, and whether an earlier try failed on the way."""

    values: list[Any]
    asked: float
    retried: bool


class Wire:
    """Pipelined calls to one server, from any thread; a forked child opens connections of its own."""

    def __init__(self, pool: Any, timeout: float | None, owner: object = None) -> None:
        self._owner = owner  # keeps a client that was passed in alive: its pool may find the server
        self._class = pool.connection_class
        self._options = {
            key: value for key, value in pool.connection_kwargs.items() if not key.startswith(_NOT_OURS)
        }
        self.timeout = float(timeout or pool.connection_kwargs.get("socket_timeout") or TIMEOUT_S)
        self.where = _where(self._class, self._options)
        self._errors = _errors_of(self._class)
        self._idle: deque[Any] = deque()
        self._busy: set[Any] = set()
        self._listening: dict[str, Any] = {}
        self._pid = os.getpid()
        self._closed = False
        self._silent = False

    def call(self, *commands: Command, timeout: float | None = None, once: bool = False) -> Replies:
        """Send *commands* in one round trip and return their replies; again until *timeout* if it fails.

        *once*: no second try when the server refuses the connection.
        """
        limit = min(self.timeout, AGAIN_S) if self._silent else self.timeout
        limit = limit if timeout is None else timeout
        deadline = time.monotonic() + limit
        pause = 0.0
        while True:
            asked = boottime()
            try:
                replies = self._exchange(commands, deadline)
                self._silent = False
                return Replies(replies, asked, pause > 0)
            except _Passing as failure:
                left = deadline - time.monotonic()
                if once or left <= pause or self._closed:
                    self._silent = limit >= self.timeout or self._silent
                    asked_for = "" if once else f" to {commands[0][0]} within {limit:.3g} s"
                    raise BackendUnavailable(f"{self.where}: no answer{asked_for}: {failure}") from None
            time.sleep(pause)
            pause = min(max(2 * pause, 0.01), 0.25)

    def listen(
        self, key: str, seconds: float, *commands: Command, wanted: Callable[[], bool] = lambda: True
    ) -> Replies | None:
        """Wait until something comes to the list *key*, at most *seconds*, and only then run *commands*.

        All go out at once, so that the server itself goes on from one to the other. None when that
        failed, or is not *wanted* any more (see :meth:`hush`): the caller then asks anew.
        """
        asked = boottime()
        limit = time.monotonic() + seconds + AGAIN_S  # the server ends the wait, or is given up
        wait = ("BLPOP", key, f"{max(math.ceil(seconds * 1000), 1) / 1000:.3f}")
        try:
            return Replies(self._exchange([wait, *commands], limit, key, wanted)[1:], asked, False)
        except _Passing:
            if wanted():
                time.sleep(min(0.05, seconds))
            return None

    def hush(self, key: str) -> None:
        """End a :meth:`listen` to *key*; what it had still to run is not run."""
        if (connection := self._listening.get(key)) is not None:
            _cut(connection)

    def close(self) -> None:
        """Close every connection, also those in use, whose calls then fail."""
        self._closed = True
        for connection in list(self._idle):
            connection.disconnect()
        self._idle.clear()
        for connection in list(self._busy):
            _cut(connection)

    def forget(self) -> None:
        """In a forked child: drop the parent's connections without a word to the server."""
        for connection in [*self._idle, *self._busy]:
            connection.disconnect()  # closes this process's descriptor only
        self._idle, self._busy, self._listening = deque(), set(), {}
        self._pid = os.getpid()
        self._closed = False

    # -- one try ----------------------------------------------------------------------------------

    def _exchange(
        self,
        commands: Sequence[Command],
        deadline: float,
        listens_to: str = "",
        wanted: Callable[[], bool] = lambda: True,
    ) -> list[Any]:
        connection = self._checkout(deadline)
        self._busy.add(connection)
        if listens_to:
            self._listening[listens_to] = connection
        clean = False
        try:
            if self._closed or not wanted():  # read after close() and hush() can find the connection
                raise _Passing(CLOSED)
            replies = self._send(connection, [_evalsha(command) for command in commands], deadline)
            unknown = [i for i, reply in enumerate(replies) if isinstance(reply, self._errors.NoScriptError)]
            if unknown:
                again = self._send(connection, [_eval(commands[i]) for i in unknown], deadline)
                for i, reply in zip(unknown, again, strict=True):
                    replies[i] = reply
            # a server that refuses may not be the one to ask: the next connection looks for it anew
            clean = not self._closed and not any(isinstance(reply, Exception) for reply in replies)
        except (self._errors.RedisError, OSError) as error:
            raise self._told(error) from None
        finally:
            self._busy.discard(connection)
            self._listening.pop(listens_to, None)
            if clean and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.disconnect()
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._told(reply)
        return replies

    def _send(self, connection: Any, commands: list[Command], deadline: float) -> list[Any]:
        connection.send_packed_command([_packed(commands)])
        replies: list[Any] = []
        for _ in commands:
            left = deadline - time.monotonic()
            if not connection.can_read(max(left, 0.05)):  # we may have been frozen, and the reply be there
                raise self._errors.TimeoutError("no answer")
            try:
                replies.append(connection.read_response())
            except self._errors.ResponseError as error:  # the reply to this command; the next follows
                replies.append(error)
        return replies

    def _checkout(self, deadline: float) -> Any:
        if self._pid != os.getpid():
            self.forget()
        while self._idle:
            with suppress(IndexError, self._errors.ConnectionError, self._errors.TimeoutError, OSError):
                connection = self._idle.pop()
                if not connection.can_read(0):  # nothing to read: neither closed nor out of step
                    return connection
                connection.disconnect()
        if self._closed:
            raise _Passing(CLOSED)
        limit = max(min(deadline - time.monotonic(), self.timeout), 0.01)
        try:
            connection = self._class(
                **self._options, socket_timeout=limit, socket_connect_timeout=limit, protocol=2
            )
        except TypeError as error:
            raise BackendMisconfigured(
                f"{self.where}: an option that its client does not know: {error}"
            ) from None
        try:
            connection.connect()
        except (self._errors.RedisError, OSError) as error:
            connection.disconnect()
            raise self._told(error) from None
        return connection

    def _told(self, error: Exception) -> Exception:
        """What a client's *error* is to our callers."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, self._errors.AuthenticationError | self._errors.NoPermissionError):
            return BackendMisconfigured(f"{self.where} refused the credentials: {text}")
        passing = isinstance(error, self._errors.ReadOnlyError | self._errors.BusyLoadingError)
        if passing or str(error).startswith(_PASSING) or not isinstance(error, self._errors.ResponseError):
            return _Passing(text)
        return BackendMisconfigured(f"{self.where} cannot be used: {text}")


class _Passing(Exception):
    """A failure after which the same commands are worth another try."""


def pool_of(client: Any) -> Any:
    """The pool of a redis-py or valkey-py *client*, which knows how to connect."""
    pool = getattr(client, "connection_pool", None)
    if pool is None or any(".asyncio" in base.__module__ for base in type(client).__mro__):
        raise BackendMisconfigured(
            f"client is a {type(client).__module__}.{type(client).__name__}; expected a blocking client of "
            "redis-py or valkey-py for one server (redis.Redis)"
        )
    return pool


def pool_from(url: str, options: dict[str, Callable[[str], Any]]) -> tuple[Any, dict[str, Any]]:
    """A pool for *url*, and what its query says of our own *options* (name -> how to read it)."""
    redis = need("redis", "redis")
    parts = split_url(url)
    ours, theirs = {}, []
    try:
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key in options:
                ours[key] = options[key](value)
            else:
                theirs.append((key, value))
        if "@" in parts.fragment or (parts.scheme == "unix" and parts.netloc and "@" not in parts.netloc):
            raise ValueError("it has a part that means nothing")
        if parts.scheme != "unix" and parts.path.strip("/"):
            int(parts.path.strip("/"))
        # not urlunsplit: it makes unix:/path of unix:///path
        pool = redis.ConnectionPool.from_url(f"{url.partition('?')[0]}?{urlencode(theirs)}")
        _check_options([key for key, _ in theirs], list(options), pool.connection_class)
        return pool, ours
    except ValueError as error:
        raise BackendMisconfigured(
            f"backend URL is {without_password(url)!r}: {why_not(url, error)}; expected "
            "redis://[user:password@]host[:port][/db], rediss://... or unix:///path[?db=n]"
        ) from None


def _check_options(given: Sequence[str], ours: Sequence[str], connection_class: type) -> None:
    """Raise ValueError for an option that neither we nor the client's connections have."""
    has = {name for base in connection_class.__mro__[:-1] for name in signature(base).parameters}
    for key in given:
        if key not in has and key != "max_connections":
            like = get_close_matches(key, [*ours, *sorted(has)]) or ["db", "username", "socket_timeout"]
            raise ValueError(
                f"option {key!r} is unknown; expected {', '.join(ours)}, or one of the client's "
                f"{connection_class.__name__}, such as {', '.join(like)}"
            )


def _where(connection_class: type, options: dict[str, Any]) -> str:
    db = f"/{options['db']}" if options.get("db") else ""
    if "connection_pool" in options:
        return f"redis{db} ({options['connection_pool'].service_name!r} of a Sentinel)"
    if "path" in options:
        return f"unix://{options['path']}{db}"
    scheme = "rediss" if "SSL" in connection_class.__name__ else "redis"
    return f"{scheme}://{options.get('host', 'localhost')}:{options.get('port', 6379)}{db}"


def _errors_of(connection_class: type) -> Any:
    """The exceptions module of the package that the connections come from."""
    for base in connection_class.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("redis", "valkey"):
            return import_module(f"{package}.exceptions")
    raise BackendMisconfigured(
        f"connections of {connection_class.__module__} are neither redis-py's nor valkey-py's"
    )


def _cut(connection: Any) -> None:
    """End the stream of a connection that another thread reads from: that thread closes it."""
    with suppress(AttributeError, OSError):
        connection._sock.shutdown(socket.SHUT_RDWR)


def _packed(commands: Sequence[Command]) -> bytes:
    """*commands* as they go over the wire, in a third of the clients' own time for it."""
    parts = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for argument in command:
            data = argument if isinstance(argument, bytes) else str(argument).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def _evalsha(command: Command) -> Command:
    """A command to send: a script goes by its hash."""
    script, *rest = command
    return ("EVALSHA", script.sha, *rest) if isinstance(script, Script) else command


def _eval(command: Command) -> Command:
    return ("EVAL", command[0].source, *command[1:])
