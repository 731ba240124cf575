"""Ending the connections of a gloo group from outside: gloo itself ends no operation before its timeout.

A connection whose operation was given up in the middle of a write carries nothing any more, and gloo's thread
spins on it. Shut down, it is an error to gloo: every operation that waits for it ends. A group's connections
are those to the addresses on which its ranks listen. Linux; elsewhere nothing is found, and nothing is done.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TypeVar

__all__ = ["Address", "listener_of", "sever"]

Address = tuple[str, int]

DeviceT = TypeVar("DeviceT")

_creating = threading.Lock()


def listener_of(create: Callable[[], DeviceT]) -> tuple[DeviceT, Address | None]:
    """What *create* made, and the address on which it listens now; None when that cannot be told."""
    with _creating:  # so that of two that are made at once each finds its own
        before = set(_listeners())
        device = create()
        new = set(_listeners()) - before
    return device, new.pop() if len(new) == 1 else None


def sever(listeners: Collection[Address]) -> int:
    """Shut down every connection of this process from or to one of these; how many there were."""
    count = 0
    for one in _sockets():
        with suppress(OSError):
            if not {_address(one.getsockname()), _address(one.getpeername())}.isdisjoint(listeners):
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _listeners() -> Iterator[Address]:
    for one in _sockets():
        with suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield _address(one.getsockname())


def _sockets() -> Iterator[socket.socket]:
    """Each TCP socket of this process, by a descriptor of our own, closed again behind it."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield one


def _address(name: tuple[str, int]) -> Address:
    """A socket's name, the same for an IPv4 address and for the same one in an IPv6 socket."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(name[1])
