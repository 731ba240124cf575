"""The leader's own TCPStore, where the ranks of a refit meet: which address it has, serving it, joining it.

The port is always the system's choice, so there is no free port that somebody else can take first. The
address is chosen once, here, and tried before it is handed out.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
from typing import TYPE_CHECKING

from ..exceptions import BackendMisconfigured, BackendUnavailable
from ..torchstore import connect_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..membership import Epoch

__all__ = ["choose_address", "forget_groups", "join_store", "leader_store"]

_OF_A_GROUP = re.compile(r"refit/\d+\.\d+/\d+/")
_log = logging.getLogger("dprims.rendezvous")


def choose_address(host: str | None = None) -> str:
    """A numeric address of this machine under which other ranks can reach it.

    With `host` None: what the host name resolves to, unless that is a loopback address (as Debian's
    127.0.1.1), then the address of the interface with the default route, and loopback when there is no other,
    which is logged, since then only ranks of this host can join.

    Args:
        host: a name or an address of this machine; loopback is taken when it is asked for.

    Raises:
        BackendMisconfigured: `host` does not resolve, or is no address of this machine.
    """
    if host is not None:
        found = _resolve(host)
        if not found:
            raise BackendMisconfigured(f"host {host!r} does not resolve to an address")
        mine = next((address for address in found if is_here(address)), None)
        if mine is None:
            raise BackendMisconfigured(f"host {host!r} is {', '.join(found)}, which is not on this machine")
        return mine
    named = [address for address in _resolve(socket.gethostname()) if is_here(address)]
    for address in (*named, *_routed()):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    loopback = next((address for address in ("127.0.0.1", "::1") if is_here(address)), None)
    if loopback is None:
        raise BackendMisconfigured(f"host {socket.gethostname()!r} has no address at all, not even loopback")
    _log.warning("the only address is %s: ranks on other hosts cannot join", loopback)
    return loopback


def leader_store(host: str | None = None, *, timeout_s: float = 30.0) -> tuple[TCPStore, str, int]:
    """Serve a TCPStore from this process: (store, address, port). It lives as long as the store object.

    Args:
        host: as for `choose_address`.
        timeout_s: the bound that torch puts on the store's waits, in seconds.

    Raises:
        BackendMisconfigured: there is no usable address.
        BackendUnavailable: the store does not answer under the address that was chosen.
    """
    address = choose_address(host)
    try:
        store = serve_store(address, timeout_s=timeout_s)
    except (OSError, RuntimeError) as error:
        raise BackendUnavailable(f"serving a TCPStore at {address} failed: {error}") from error
    return store, address, store.port


def forget_groups(store: TCPStore, *, but: Epoch) -> None:
    """Delete from a leader's store what the groups of every other epoch than *but* left there.

    Where torch cannot list keys they stay, about 2 KB a build.
    """
    if not hasattr(store, "list_keys"):
        return
    for key in store.list_keys():
        if _OF_A_GROUP.match(key) and not key.startswith(f"refit/{but}/"):
            store.delete_key(key)


def join_store(host: str, port: int, *, timeout_s: float = 30.0) -> TCPStore:
    """A client of the store at `host`:`port`.

    Raises BackendUnavailable when nothing answers there within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            return connect_store(host, port, timeout_s=max(left, 0.05))
        except OSError as error:
            if left < 0.1 or isinstance(error, socket.gaierror):
                raise BackendUnavailable(f"no store answers at {host}:{port}: {error}") from error
            time.sleep(0.05)
        except RuntimeError as error:
            raise BackendUnavailable(f"the store at {host}:{port} does not answer: {error}") from error


def _resolve(host: str) -> list[str]:
    """Numeric addresses of a name, IPv4 first; empty when there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = {str(entry[4][0]) for entry in found}
    # a link-local address means nothing without the interface's name, which is another one on each host
    usable = [a for a in addresses if "%" not in a and not ipaddress.ip_address(a).is_link_local]
    return sorted(usable, key=lambda a: (":" in a, a))


def is_here(address: str) -> bool:
    """Whether a socket can be bound to the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _routed() -> list[str]:
    """Addresses of the interfaces that lead outside. Nothing is sent: a datagram socket is only routed."""
    addresses = []
    for family, far in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                addresses.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return addresses
