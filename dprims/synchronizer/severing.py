"""Ending the connections of a gloo group from outside: gloo itself ends no operation before its timeout.

A connection whose operation was given up in the middle of a write carries nothing any more, and gloo's thread
spins on it. Shut down, it is an error to gloo: every operation that waits for it ends. A group's connections
are those to the addresses on which its ranks listen. Linux; elsewhere nothing is found, and nothing is done.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
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
    for number in _descriptors():
        peer = _address(_libc.getpeername, number)
        if peer is not None and not {peer, _address(_libc.getsockname, number)}.isdisjoint(listeners):
            count += _libc.shutdown(number, socket.SHUT_RDWR) == 0
    return count


def _listeners() -> Iterator[Address]:
    for number in _descriptors():
        name = _address(_libc.getsockname, number)
        if name is not None and _option(number, socket.SO_ACCEPTCONN):
            yield name


def _descriptors() -> Iterator[int]:
    """A descriptor of our own for each socket of this process, closed again behind it.

    No socket object is made of it: that may set the default timeout, for whoever else has the socket.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            mine = os.dup(number)
            try:
                yield mine
            finally:
                os.close(mine)


_libc = ctypes.CDLL(None)
_IPV4, _IPV6 = slice(4, 8), slice(8, 24)
"""Where the address lies in a C `sockaddr_in`, and in a `sockaddr_in6`; the port is at 2 in both."""


def _option(number: int, option: int) -> int:
    value, size = ctypes.c_int(), ctypes.c_uint32(4)
    failed = _libc.getsockopt(number, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size))
    return 0 if failed else value.value


def _address(call: Callable[..., int], number: int) -> Address | None:
    """What *call* names of a TCP socket, the same for an IPv4 address and for that one in an IPv6 socket."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if call(number, name, ctypes.byref(size)) or _option(number, socket.SO_TYPE) != socket.SOCK_STREAM:
        return None
    raw = name.raw
    family = int.from_bytes(raw[:2], sys.byteorder)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    address = ipaddress.ip_address(raw[_IPV4 if family == socket.AF_INET else _IPV6])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int.from_bytes(raw[2:4], "big")
