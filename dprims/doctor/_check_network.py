"""Names and addresses of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from ._check_environment import is_loopback
from .facts import Lookup, NetworkFacts
from .findings import Finding, find

SLOW_S = 1.0
"""A lookup that takes longer is felt: a nameserver that does not answer costs 5 s."""


def check_network(network: NetworkFacts) -> Iterator[Finding]:
    """How other ranks reach a leader here, and what stands in the way."""
    if not network.chosen:
        yield find("host-none", error=network.chosen_error)
        return
    wrong = [*_host(network), *_lookups(network)]
    if ":" in network.chosen:
        wrong.append(find("address-v6", address=network.chosen))
    if network.localhost and all(":" in address for address in network.localhost):
        wrong.append(find("localhost-v6", addresses=", ".join(network.localhost)))
    if all(one.level == "note" for one in wrong):
        yield find(
            "host-ok",
            host=network.host,
            address=network.chosen,
            ms=network.forward.seconds * 1e3,
            reverse_ms=network.reverse.seconds * 1e3,
        )
    yield from wrong


def _host(network: NetworkFacts) -> Iterator[Finding]:
    host, chosen, found = network.host, network.chosen, network.forward.found
    if is_loopback(chosen):
        yield find("host-only-loopback", address=chosen)
    if not found:
        if not network.forward.timed_out:
            yield find("host-unresolvable", host=host, address=chosen)
    elif all(is_loopback(address) for address in found):
        if not is_loopback(chosen):
            yield find("host-loopback", host=host, address=", ".join(found), chosen=chosen)
    elif not network.mine:
        yield find("host-elsewhere", host=host, address=", ".join(found), chosen=chosen)


def _lookups(network: NetworkFacts) -> Iterator[Finding]:
    if network.forward.seconds > SLOW_S:
        yield find("lookup-slow", host=network.host, **_time(network.forward))
    if network.reverse.seconds > SLOW_S:
        yield find("reverse-slow", address=network.chosen, **_time(network.reverse))


def _time(lookup: Lookup) -> dict[str, object]:
    return {"seconds": lookup.seconds, "limit": " and was given up" if lookup.timed_out else ""}
