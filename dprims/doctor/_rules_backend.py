"""What can be found of a backend."""

from __future__ import annotations

from .rule import Rule

BACKEND = (
    Rule(
        "backend", "backend-none", "note", "no backend was looked at",
        "name one: dprims doctor URL, or $DPRIMS_BACKEND",
    ),
    Rule("backend", "backend-ok", "ok", "{url} answers{version}"),
    Rule("backend", "backend-lock", "ok", "a lock was taken and given back in {ms:.1f} ms"),
    Rule(
        "backend", "backend-lock-fails", "error", "a lock could not be taken and given back: {error}",
        "give the user write access to the prefix, and room to the server",
    ),
    Rule(
        "backend", "backend-guarantees", "ok",
        "promises: seen by {scope}, locks survive a restart of the server: {survives}, tokens grow after a "
        "loss of "
        "its data: {tokens}, ttl at least {min_ttl:g} s, a killed holder is succeeded after {killed}; a "
        "ttl is "
        "measured by {clock}",
    ),
    Rule("backend", "backend-limits", "note", "not promised: {limits}"),
    Rule("backend", "latency-ok", "ok", "a round trip takes {ms:.2f} ms (median of {count}, at most "
    "{most:.2f})"),
    Rule(
        "backend", "latency-high", "warning",
        "a round trip takes {ms:.0f} ms (median of {count}, at most {most:.0f}): a lock, and each step of "
        "a refit's "
        "commit, takes several",
        "run the backend nearer to the ranks, and look at its load; keep ttls far above",
    ),
    Rule(
        "backend", "name-unknown", "error", "the host {host} of {url} does not resolve",
        "correct the name, or put it into /etc/hosts or DNS",
    ),
    Rule(
        "backend", "refused", "error", "nothing listens at {host}:{port} of {url}",
        "start the server, correct the port, or have it listen at that address and not at 127.0.0.1 alone",
    ),
    Rule(
        "backend", "unreachable", "error", "no way to {host}:{port} of {url}: {error}",
        "look at routes and firewalls between this machine and the server",
    ),
    Rule(
        "backend", "socket-missing", "error", "{url}: {error}",
        "start the server, or correct the path of its socket",
    ),
    Rule(
        "backend", "silent", "error",
        "{url} accepts connections and does not answer: {error}",
        "the server is frozen or overloaded, or something else listens there; look at it, and restart it",
    ),
    Rule(
        "backend", "rejected", "error", "{url} refuses: {error}",
        "correct the user, the password, TLS (rediss://, etcds://) or the options in the URL",
    ),
    Rule(
        "backend", "extra-needed", "error", "{url}: {error}",
        "install the extra that it names on every rank",
    ),
    Rule(
        "backend", "failed", "error", "{url}: {error}",
        "this is no answer that the doctor knows: look at the server's log",
    ),
    Rule("backend", "clock-ok", "ok", "the server's clock is {seconds:.3f} s from ours (within {error:.3f} "
    "s)"),
    Rule(
        "backend", "clock-off", "warning", "the server's clock is {seconds:.1f} s from ours",
        "synchronise both with NTP: no lock depends on it, but new tokens after a loss of the server's "
        "data do, and "
        "the times that people compare",
    ),
    Rule("backend", "clock-none", "note", "the server tells no time; nothing here compares clocks of two "
    "hosts"),
    Rule(
        "backend", "redis-old", "error", "this is Redis {version}; at least 6.0.6 is needed",
        "use a newer Redis, or Valkey",
    ),
    Rule(
        "backend", "redis-replica", "error", "this is a replica of {master}: it refuses to write",
        "name the primary in the URL, or a Sentinel's client",
    ),
    Rule(
        "backend", "redis-evicts", "warning",
        "it drops keys when its memory is full (maxmemory-policy {policy}): a lock that is held can vanish",
        "set maxmemory-policy noeviction, or use a server of its own for locks",
    ),
    Rule(
        "backend", "redis-forgets", "note",
        "it writes no append-only file: a restart forgets all locks; holders learn so at their next beat",
        "set appendonly yes and appendfsync always, if locks are to survive a restart",
    ),
    Rule(
        "backend", "etcd-no-leader", "error", "the etcd cluster has no leader: {error}",
        "bring a majority of its members up again",
    ),
    Rule(
        "backend", "etcd-full", "error", "etcd has raised the alarm {alarm}: it refuses to write",
        "compact and defragment it, then etcdctl alarm disarm",
    ),
    Rule(
        "backend", "process-only", "warning",
        "{url} is seen by the threads of one process only: no other rank takes part",
        "use tcpstore://, redis:// or etcd:// for a fleet",
    ),
)  # fmt: skip
