"""One process's connections to an etcd cluster: calls that are bounded, and that change endpoints.

A call goes to the endpoint in use. When that does not answer, the next one is in use from then on; none
is ever shut out, so a cluster that comes back is found at the next try. All endpoints share the time of
a call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dprims.exceptions import BackendMisconfigured, BackendUnavailable

from ._etcd_url import EtcdUrl
from ._etcd_wire import grpc, rpc

log = logging.getLogger("dprims.etcd")
T = TypeVar("T")

PAUSE_S = 0.1
"""How long a call rests after it has tried every endpoint."""

# Pings find a peer that is gone without a word; etcd refuses them more often than every 5 s.
_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
]
_TRANSIENT = frozenset(
    getattr(grpc.StatusCode, name)
    for name in (
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "INTERNAL",
        "UNKNOWN",
        "CANCELLED",
        "ABORTED",
    )
)
_TOO_LARGE = "larger than max"
_TOKEN_IS_STALE = ("invalid auth token", "revision of auth store is old")
_WANT_LEADER = ("hasleader", "true")  # a member that is cut off from the others says so instead of waiting


class Endpoint:
    """One member of the cluster, and the stubs to call it with."""

    def __init__(self, name: str, channel: Any, *, owned: bool) -> None:
        self.name = name
        self._channel = channel
        self._owned = owned
        self.kv = rpc.KVStub(channel)
        self.lease = rpc.LeaseStub(channel)
        self.watch = rpc.WatchStub(channel)
        self.auth = rpc.AuthStub(channel)
        self.maintenance = rpc.MaintenanceStub(channel)

    def close(self) -> None:
        """Close the channel, unless it is the caller's."""
        if self._owned:
            self._channel.close()


def open_endpoints(url: EtcdUrl) -> list[Endpoint]:
    """A channel to each endpoint of *url*; nothing is sent yet."""
    if not url.tls:
        return [
            Endpoint(name, grpc.insecure_channel(name, options=_OPTIONS), owned=True)
            for name in url.endpoints
        ]
    credentials = grpc.ssl_channel_credentials(url.ca, url.key, url.cert)
    return [
        Endpoint(name, grpc.secure_channel(name, credentials, options=_OPTIONS), owned=True)
        for name in url.endpoints
    ]


def endpoints_of(client: Any) -> list[Endpoint]:
    """The channels of an ``etcd3.client()``: one in etcd3 0.12, one for each endpoint in etcd3-fc."""
    if hasattr(client, "endpoints"):
        return [Endpoint(one.netloc, one.channel, owned=False) for one in client.endpoints.values()]
    return [Endpoint(client._url, client.channel, owned=False)]


class Link:
    """Calls to a cluster.

    *login* returns the auth token for an endpoint within a time, or None where none is needed.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        login: Callable[[Endpoint, float], str | None],
        timeout: float,
    ) -> None:
        self.timeout = timeout
        self.on_move: Callable[[], None] = _nothing
        """Called when another endpoint is in use, for streams to follow."""
        self._endpoints = list(endpoints)
        self._login = login
        self._lock = threading.Lock()
        self._current = 0
        self._metadata: tuple[tuple[str, str], ...] | None = None
        self._closed = False

    def __str__(self) -> str:
        return ",".join(endpoint.name for endpoint in self._endpoints)

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint in use."""
        return self._endpoints[self._current]

    def run(
        self, what: str, attempt: Callable[[Endpoint, dict[str, Any]], T], timeout: float | None = None
    ) -> T:
        """Do *attempt* with an endpoint and the limits of its calls, again until one succeeds.

        *attempt* has to be harmless when repeated, as a lost reply looks like a lost request. Raises
        BackendUnavailable after *timeout* seconds (None: the link's), BackendMisconfigured when the
        server refuses.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        untried = len(self._endpoints)
        renewed = False
        while True:
            if self._closed:
                raise BackendUnavailable(f"cannot {what}: the connection to etcd at {self} is closed")
            left = max(deadline - time.monotonic(), 0.001)
            endpoint = self.endpoint
            share = left / max(untried, 1)
            try:
                return attempt(endpoint, {"timeout": share, "metadata": self.metadata(endpoint, share)})
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
                stale = any(text in details for text in _TOKEN_IS_STALE)
                transient = code in _TRANSIENT and _TOO_LARGE not in details
                if not (transient or (stale and not renewed)):
                    raise BackendMisconfigured(
                        f"etcd at {endpoint.name} refused to {what}: {details}"
                    ) from error
                failure = error
            except ValueError as error:  # grpc's word for a closed channel
                if "closed" not in str(error):
                    raise
                raise BackendUnavailable(
                    f"cannot {what}: the connection to etcd at {self} is closed"
                ) from error
            if stale:
                renewed = True
                self.forget_token()
                continue
            self.leave(endpoint)
            untried -= 1
            pause = PAUSE_S if untried <= 0 else 0.0
            if not self._closed and time.monotonic() + pause >= deadline:
                raise BackendUnavailable(
                    f"etcd at {self} did not {what} within {limit:g} s: "
                    f"{endpoint.name} says {code.name}: {details}"
                ) from failure
            time.sleep(pause)

    def metadata(self, endpoint: Endpoint, timeout: float) -> tuple[tuple[str, str], ...]:
        """What goes along with each call; asks for an auth token when there is none yet."""
        known = self._metadata
        if known is None:
            token = self._login(endpoint, timeout)
            known = (_WANT_LEADER,) if token is None else (_WANT_LEADER, ("token", token))
            self._metadata = known
        return known

    def forget_token(self) -> None:
        """Ask for a new auth token before the next call."""
        self._metadata = None

    def leave(self, endpoint: Endpoint) -> None:
        """Use the next endpoint from now on, if *endpoint* is the one in use."""
        with self._lock:
            if endpoint is not self.endpoint or len(self._endpoints) == 1:
                return
            self._current = (self._current + 1) % len(self._endpoints)
        log.info("etcd: %s does not answer; using %s", endpoint.name, self.endpoint.name)
        self.on_move()

    def close(self) -> None:
        """End every call, and close the channels that are ours."""
        self._closed = True
        for endpoint in self._endpoints:
            endpoint.close()


def login_with(user: str, password: str) -> Callable[[Endpoint, float], str | None]:
    """A login by *user* and *password*; a cluster that has no users needs no token."""

    def login(endpoint: Endpoint, timeout: float) -> str | None:
        if not user:
            return None
        request = rpc.AuthenticateRequest(name=user, password=password)
        try:
            return str(endpoint.auth.Authenticate(request, timeout=timeout).token)
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return None
            raise

    return login


def login_of(client: Any) -> Callable[[Endpoint, float], str | None]:
    """The login of an ``etcd3.client()``, which keeps its token and no password."""

    def login(endpoint: Endpoint, timeout: float) -> str | None:
        return dict(client.metadata or ()).get("token")

    return login


def _nothing() -> None:
    """No stream is open yet."""
