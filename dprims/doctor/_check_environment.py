"""Variables of the environment, by the table of their effects, and those that need more than a look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ._rules_environment import VARIABLES
from .facts import NetworkFacts
from .findings import Finding, find

INTERFACES = {"NCCL_SOCKET_IFNAME": "NCCL", "GLOO_SOCKET_IFNAME": "gloo"}
"""Variables that name interfaces, and who reads them."""

READ = frozenset(
    {name for variable in VARIABLES for name in variable.names}
    | {*INTERFACES, "NCCL_SOCKET_FAMILY", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
)
"""Every variable that is looked at, besides $DPRIMS_BACKEND."""


def check_environment(environ: Mapping[str, str], network: NetworkFacts) -> Iterator[Finding]:
    """What the variables that are set will do to a refit."""
    found = [*_effects(environ), *_interfaces(environ, network), *_master(environ, network)]
    family = environ.get("NCCL_SOCKET_FAMILY", "")
    if family in ("AF_INET", "AF_INET6") and family not in network.families:
        found.append(find("env-nccl-family", value=family))
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    if "MIG-" in devices:
        found.append(find("env-mig", value=devices))
    yield from found or [find("env-ok", count=len(READ))]


def _effects(environ: Mapping[str, str]) -> Iterator[Finding]:
    for variable in VARIABLES:
        name = next((name for name in variable.names if name in environ), None)
        if name is not None and variable.when(environ[name]):
            yield find(variable.code, name=name, value=environ[name])


def _interfaces(environ: Mapping[str, str], network: NetworkFacts) -> Iterator[Finding]:
    for name, who in INTERFACES.items():
        value = environ.get(name, "")
        if not value:
            continue
        chosen = _chosen(value, network.interfaces, exact=who == "gloo")
        if not chosen:
            there = ", ".join(network.interfaces) or "none"
            yield find("env-interface-missing", name=name, value=value, interfaces=there, who=who)
        elif chosen == {"lo"}:
            yield find("env-interface-loopback", name=name, value=value, who=who)


def _chosen(value: str, interfaces: tuple[str, ...], *, exact: bool) -> set[str]:
    """The interfaces that a value means: NCCL takes prefixes, ``=`` for whole names and ``^`` for all but."""
    excluded, whole = value.startswith("^"), exact
    value = value.removeprefix("^")
    if value.startswith("="):
        whole, value = True, value[1:]
    names = [name for name in value.split(",") if name]
    hit = {one for one in interfaces for name in names if (one == name if whole else one.startswith(name))}
    return set(interfaces) - hit if excluded and not exact else hit


def _master(environ: Mapping[str, str], network: NetworkFacts) -> Iterator[Finding]:
    value = environ.get("MASTER_ADDR", "")
    if not value or network.master is None:
        return
    if not network.master.found:
        yield find("env-master-unresolvable", value=value)
        return
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    apart = world.isdecimal() and local.isdecimal() and int(world) > int(local)
    if apart and all(is_loopback(address) for address in network.master.found):
        yield find("env-master-loopback", value=value, world=world, local=local)


def is_loopback(address: str) -> bool:
    """Whether an address means the machine that says it."""
    return address.startswith("127.") or address == "::1"
