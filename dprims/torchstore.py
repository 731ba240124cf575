"""Serve a torch ``TCPStore`` on a socket of our own, and connect to one.

torch listens on IPv6 for both families, and so sees a peer 127.0.0.1 as ::ffff:127.0.0.1, which it looks up
by name when it accepts the connection, on the one thread that serves everybody. No hosts file has that
name, and where the resolver does not answer each new connection can stall the whole store for five seconds.
A socket of the address's own family sees the peer under the name that the hosts file has.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

BACKLOG = 1024


def connect_store(host: str, port: int, *, timeout_s: float = 30.0) -> TCPStore:
    """A client of the store at *host*:*port*, whose waits torch bounds by *timeout_s*.

    torch retries in silence and then says little, so a plain connection is made first: OSError says what
    is wrong. It stays open until torch has connected, as torch's server warns of one that goes at once.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_connection((host, port), timeout=timeout_s):
        return TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )


def serve_store(host: str, port: int = 0, *, timeout_s: float = 30.0) -> TCPStore:
    """Serve a store at *host*, an address or name of this machine, and at no other address of it.

    Port 0 takes a free one; ``store.port`` says which. It is served for as long as the object lives.
    OSError when the address cannot be listened on, RuntimeError when torch refuses.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        store = TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.fileno(),
        )
    except BaseException:
        listener.close()
        raise
    listener.detach()  # the store closes it
    return store
