"""What an ``etcd://`` URL says."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from dprims.backend import split_url
from dprims.exceptions import BackendMisconfigured

from ._urls import why_not, without_password

DEFAULT_PORT = 2379
TIMEOUT_S = 5.0
PREFIX = "dprims"
_FORM = "etcd://[user:password@]host[:port][,host[:port]...][/prefix][?timeout=s&ca=file&cert=file&key=file]"


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """The parts of ``etcd://user:password@h1:2379,h2:2379/prefix?timeout=5`` or ``etcds://``.

    ``timeout`` bounds one call, in seconds, over all endpoints together.
    """

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = ""
    prefix: str = PREFIX
    timeout: float = TIMEOUT_S
    tls: bool = False
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None

    @classmethod
    def parse(cls, url: str) -> EtcdUrl:
        """Read *url* and the certificate files that it names; raises BackendMisconfigured."""
        try:
            return cls._parse(url)
        except ValueError as error:
            shown = f"backend URL is {without_password(url)!r}"
            raise BackendMisconfigured(f"{shown}; {why_not(url, error)}") from None

    @classmethod
    def _parse(cls, url: str) -> EtcdUrl:
        parts = split_url(url)
        if parts.scheme not in ("etcd", "etcds") or not parts.netloc or parts.fragment:
            raise ValueError(f"expected {_FORM}")
        login, _, hosts = parts.netloc.rpartition("@")
        user, _, password = (unquote(part) for part in login.partition(":"))
        if bool(user) != bool(password):
            raise ValueError("expected both user and password, or neither")
        tls = parts.scheme == "etcds"
        timeout = TIMEOUT_S
        files: dict[str, bytes] = {}
        for option, value in parse_qsl(parts.query, keep_blank_values=True):
            if option == "timeout":
                timeout = _seconds(value)
            elif option in ("ca", "cert", "key") and tls:
                files[option] = _read(option, value)
            else:
                known = "timeout, ca, cert, key" if tls else "timeout (ca, cert, key with etcds://)"
                raise ValueError(f"its option is {option!r}, expected one of {known}")
        if ("cert" in files) != ("key" in files):
            raise ValueError("expected both cert and key, or neither")
        return cls(
            endpoints=tuple(_endpoint(host) for host in hosts.split(",")),
            user=user,
            password=password,
            prefix=unquote(parts.path.strip("/")) or PREFIX,
            timeout=timeout,
            tls=tls,
            **files,
        )


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(DEFAULT_PORT)
    number = int(port) if port.isdecimal() and port.isascii() else 0
    bare = _is_v6(host[1:-1]) if host.startswith("[") and host.endswith("]") else not set(host) & set("[]:")
    if not host or not bare or host.isspace() or not 0 < number < 65536:
        raise ValueError(f"its endpoint is {text!r}, expected host, host:port or [v6]:port")
    return f"{host}:{number}"


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"its timeout is {text!r}, expected seconds > 0")
    return seconds


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"its {option} cannot be read: {error}") from None
