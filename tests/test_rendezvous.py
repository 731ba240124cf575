"""Which address the leader's store gets, and how a rank that cannot reach it learns so."""

from __future__ import annotations

import ipaddress
import socket
import time

import pytest

from dprims.exceptions import BackendMisconfigured, BackendUnavailable
from dprims.synchronizer import rendezvous
from dprims.synchronizer.rendezvous import choose_address, join_store, leader_store


def fake_names(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    def lookup(host: str, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        if host not in addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: "me")


def only_here(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    monkeypatch.setattr(rendezvous, "is_here", lambda address: address in addresses)


def test_by_default_an_address_of_this_machine() -> None:
    address = choose_address()
    ipaddress.ip_address(address)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))


def test_a_name_that_is_given_is_resolved() -> None:
    assert choose_address("localhost") in ("127.0.0.1", "::1")
    assert choose_address("127.0.0.1") == "127.0.0.1"


def test_a_host_name_that_is_loopback_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes `127.0.1.1 <host name>` into /etc/hosts: nobody else could come there."""
    fake_names(monkeypatch, me=["127.0.1.1"])
    only_here(monkeypatch, "127.0.1.1", "127.0.0.1", "10.1.2.3")
    monkeypatch.setattr(rendezvous, "_routed", lambda: ["10.1.2.3"])
    assert choose_address() == "10.1.2.3"


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_names(monkeypatch)
    monkeypatch.setattr(rendezvous, "_routed", lambda: ["10.1.2.3"])
    assert choose_address() == "10.1.2.3"


def test_loopback_is_the_last_resort_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_names(monkeypatch, me=["127.0.1.1"])
    monkeypatch.setattr(rendezvous, "_routed", list)
    assert choose_address() == "127.0.0.1"
    assert "ranks on other hosts cannot join" in caplog.text


def test_ipv6_when_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_names(monkeypatch, me=["fe80::1%eth0", "fe80::2", "2001:db8::7"])
    only_here(monkeypatch, "fe80::2", "2001:db8::7")
    assert choose_address() == "2001:db8::7"


def test_ipv4_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_names(monkeypatch, me=["2001:db8::7", "10.0.0.9"])
    only_here(monkeypatch, "2001:db8::7", "10.0.0.9")
    assert choose_address() == "10.0.0.9"


def test_no_address_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_names(monkeypatch)
    only_here(monkeypatch)
    monkeypatch.setattr(rendezvous, "_routed", list)
    with pytest.raises(BackendMisconfigured, match="no address at all"):
        choose_address()


def test_a_host_that_is_not_this_machine() -> None:
    with pytest.raises(BackendMisconfigured, match=r"203\.0\.113\.9.*not on this machine"):
        choose_address("203.0.113.9")


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(BackendMisconfigured, match=r"nowhere\.invalid.*does not resolve"):
        choose_address("nowhere.invalid")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_is_served_can_be_joined(host: str) -> None:
    try:
        store, address, port = leader_store(host)
    except BackendMisconfigured:
        pytest.skip(f"this machine has no {host}")
    assert address == host
    join_store(address, port).set("key", "value")
    assert store.get("key") == b"value"


def test_many_stores_at_once_need_no_free_port() -> None:
    stores = [leader_store("localhost") for _ in range(20)]
    assert len({port for _, _, port in stores}) == 20


def test_a_store_that_is_not_there() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        start = time.monotonic()
        with pytest.raises(BackendUnavailable, match=r"no store answers at 127\.0\.0\.1"):
            join_store("127.0.0.1", nobody.getsockname()[1], timeout_s=0.3)
        assert time.monotonic() - start < 20
