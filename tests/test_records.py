"""What others left in a queue: read without trust, whoever wrote it."""

from __future__ import annotations

import math

import pytest

import dprims
from dprims.backend import Place
from dprims.exceptions import BackendMisconfigured, LockError
from dprims.record import make_record, owner_of, payload_of

FOREIGN = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"7",
    b'{"pid":null}',
    b'{"pid":"abc","since":"x"}',
    b'{"pid":1e999,"since":true,"rank":"0","host":5,"label":["x"]}',
    b"[" * 100_000,
    b'{"pid":' + b"9" * 400 + b',"since":' + b"9" * 400 + b"}",
    b'{"since":1,"payload":NaN}',
    b'{"since":1,"payload":1e999}',
    b'{"since":1,"payload":' + b"[" * 500 + b"]" * 500 + b"}",
]


@pytest.mark.parametrize("record", FOREIGN, ids=range(len(FOREIGN)))
def test_a_record_that_another_program_wrote_is_an_unknown_owner(record: bytes) -> None:
    owner = owner_of(Place("name", 3, record))
    assert (owner.pid, owner.since, owner.rank, owner.token) == (0, 0.0, None, 3)
    assert payload_of(Place("name", 3, record)) is None


def test_a_foreign_record_breaks_no_roster() -> None:
    with dprims.connect("memory://foreign") as backend:
        for number, record in enumerate(FOREIGN):
            backend.enqueue(f"dprims/roster/fleet/{number}", 5.0, record)
        assert len(dprims.Roster("fleet", backend).members()) == len(FOREIGN)


def test_a_payload_is_a_json_value() -> None:
    for payload in (math.nan, {1, 2}, object()):
        with pytest.raises(BackendMisconfigured):
            make_record(payload=payload)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_payload_that_no_reader_could_show_is_refused(depth: int) -> None:
    payload: list[object] = []
    for _ in range(depth):
        payload = [payload]
    with pytest.raises(BackendMisconfigured, match="nested too deep"):
        make_record(payload=payload)


@pytest.mark.parametrize("token", [math.nan, 2.5, True, "x", None])
def test_a_fence_takes_tokens_only(token: object) -> None:
    fence = dprims.FencedResource()
    fence.check(5)
    with pytest.raises(LockError, match="expected the int of a grant"):
        fence.check(token)  # type: ignore[arg-type]
    with pytest.raises(dprims.LockLost):
        fence.check(1)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 50_000,
        b'{"format":1,"train_world_size":Infinity}',
        b"null",
        dprims.RefitMembership.full(train_world_size=1, shard_sizes=(1,))
        .to_bytes()
        .replace(b'"train_world_size":1', b'"train_world_size":' + b"9" * 30)
        .replace(b'"stage_heads":[0]', b'"stage_heads":[-1]'),
    ],
    ids=range(4),
)
def test_bytes_that_are_no_membership_are_refused_quickly(data: bytes) -> None:
    with pytest.raises(dprims.MembershipError):
        dprims.RefitMembership.from_bytes(data)
