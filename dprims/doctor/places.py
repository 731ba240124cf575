"""Where a backend's servers are, by its URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from ..backend import split_url

PORTS = {"redis": 6379, "rediss": 6379, "etcd": 2379, "etcds": 2379}


def endpoints(url: str) -> list[tuple[str, int]]:
    """Where a URL of ours has its servers; none where it has none, or is of another's scheme."""
    parts = split_url(url)
    if parts.scheme == "unix":
        return [(parts.path, 0)]
    if parts.scheme not in (*PORTS, "tcpstore") or "serve=" in parts.query:
        return []
    found = []
    for place in parts.netloc.rpartition("@")[2].split(","):
        try:
            one = urlsplit(f"//{place}")
            found.append((one.hostname or "127.0.0.1", one.port or PORTS.get(parts.scheme, 0)))
        except ValueError:
            continue  # the backend itself says what is wrong with it
    return found
