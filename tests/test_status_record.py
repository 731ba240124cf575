"""The record that a leader publishes: what goes in comes out, it stays small, and what is none is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dprims.exceptions import RefitError
from dprims.membership import Epoch
from dprims.synchronizer._record import (
    OTHER,
    REASONS,
    WORDS,
    FleetRecord,
    Outage,
    SyncSummary,
    decode_record,
    encode_record,
    ranges,
    shards_in,
)

SYNC = SyncSummary(
    at=1700000000.25,
    version=7,
    epoch=Epoch(1794000000123456, 3),
    nbytes=16_000_000_000,
    seconds=1.25,
    wire_s=0.5,
    gb_per_s=32.0,
    rebuilt=True,
    phases={"prepare": 0.25, "transfer": 1.0},
)
RECORD = FleetRecord(
    event="synced",
    at=1700000000.5,
    epoch=Epoch(1794000000123456, 3),
    version=7,
    digest="ab12",
    stale=False,
    train_world_size=2,
    shard_sizes=(2, 2, 1, 1),
    members=(0, 1, 3),
    absent={2: "not in the roster"},
    syncs=7,
    failures=1,
    rebuilds=3,
    last_outage=Outage(began_at=1699999990.0, seconds=3.5, failures=2, why="PeerLost: seat 4: killed"),
    last_sync=SYNC,
    last_error="PeerLost: seat 4: killed",
    last_error_at=1699999990.0,
)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, event="failed", outage=Outage(began_at=1.0, seconds=None, failures=1, why="é\x00")),
        replace(
            RECORD, event="built", members=(), absent={}, last_sync=None, last_outage=None, last_error_at=None
        ),
    ],
)
def test_a_record_survives_the_cell(record: FleetRecord) -> None:
    assert decode_record(encode_record(record)) == record


def test_a_record_of_1024_shards_at_their_worst_is_small() -> None:
    shards = 1024
    worst = replace(
        RECORD,
        shard_sizes=tuple(1 + shard % 2 for shard in range(shards)),
        members=tuple(range(0, shards, 2)),
        absent={shard: f"\U0001f480{shard} " * 500 for shard in range(1, shards, 2)},
        last_error="\U0001f480" * 10_000,
        last_outage=replace(RECORD.last_outage, why="\U0001f480" * 10_000),
        outage=Outage(began_at=0.0, seconds=None, failures=10**6, why="\U0001f480" * 10_000),
    )
    data = encode_record(worst)
    assert len(data) < 40_000, "a cell holds 64 KiB"
    read = decode_record(data)
    assert (read.shard_sizes, read.members) == (worst.shard_sizes, worst.members)
    assert sorted(read.absent) == sorted(worst.absent)
    assert len(set(read.absent.values())) == REASONS + 1
    assert OTHER in read.absent.values()
    assert max(map(len, read.absent.values())) <= WORDS

    usual = replace(worst, members=tuple(range(1000)), absent=dict.fromkeys(range(1000, 1024), "gone"))
    usual = replace(usual, shard_sizes=(2,) * shards, last_error="", outage=None, last_outage=None)
    assert len(encode_record(usual)) < 1_000


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([5, 1, 2, 0]) == "0-2,5"
    assert shards_in("0-2,5") == [0, 1, 2, 5]
    assert shards_in("") == []


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"3", b'{"schema":1}', b"\xff", b"null", encode_record(RECORD)[:-9]]
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(RefitError, match="not a status record"):
        decode_record(data)


def test_another_schema_is_named() -> None:
    data = json.loads(encode_record(RECORD))
    with pytest.raises(RefitError, match="schema 2; this dprims reads 1"):
        decode_record(json.dumps({**data, "schema": 2}).encode())
