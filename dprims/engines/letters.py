"""Calls, answers, errors and reports as JSON, for engines whose ranks do not share a pickle's trust.

Whatever comes in is read field by field: a letter can name an error of dprims and nothing else to build.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from .. import exceptions
from ..exceptions import DprimsError, RefitAborted, RefitError
from ..membership import Epoch, RefitMembership
from ..synchronizer.calls import RankInfo, RefitAnswer, RefitCall
from ..synchronizer.clocks import Times
from ..synchronizer.lanes import Span
from ..synchronizer.plan import TensorMeta
from ..synchronizer.protocol import Holding, Kind, Reply, Staged, Version
from ..synchronizer.report import RefitReport
from ..synchronizer.transfer import TransferStats

Document = dict[str, Any]


def write_call(call: RefitCall) -> Document:
    """A call as a JSON value."""
    return {
        "kind": call.kind,
        "epoch": call.epoch,
        "version": call.version,
        "incarnations": list(call.incarnations.items()),
        "membership": None if call.membership is None else call.membership.to_bytes().decode(),
        "rendezvous": call.rendezvous,
        "plans": None if call.plans is None else [base64.b64encode(plan).decode() for plan in call.plans],
        "kv_scales": dict(call.kv_scales),
        "timeout_s": call.timeout_s,
        "stall_timeout_s": call.stall_timeout_s,
        "verify": call.verify,
    }


def read_call(found: Document) -> RefitCall:
    """What :func:`write_call` wrote."""
    membership, rendezvous, plans = found["membership"], found["rendezvous"], found["plans"]
    return RefitCall(
        kind=cast("Kind", str(found["kind"])),
        epoch=Epoch(*found["epoch"]),
        version=Version(*found["version"]),
        incarnations={int(seat): int(incarnation) for seat, incarnation in found["incarnations"]},
        membership=None if membership is None else RefitMembership.from_bytes(membership.encode()),
        rendezvous=None if rendezvous is None else (str(rendezvous[0]), int(rendezvous[1])),
        plans=None if plans is None else tuple(base64.b64decode(plan) for plan in plans),
        kv_scales={str(name): float(scale) for name, scale in found["kv_scales"].items()},
        timeout_s=found["timeout_s"],
        stall_timeout_s=found["stall_timeout_s"],
        verify=bool(found["verify"]),
    )


def write_answer(answer: RefitAnswer) -> Document:
    """An answer as a JSON value; of an error its type's name and its words."""
    reply = answer.reply
    return {
        "status": reply.status,
        "why": reply.why,
        "seen": reply.seen,
        "digest": reply.digest,
        "holding": reply.holding,
        "error": None if answer.error is None else write_error(answer.error),
        "stats": [(stage, _write_stats(stats)) for stage, stats in answer.stats.items()],
        "times": answer.times,
    }


def read_answer(found: Document) -> RefitAnswer:
    """What :func:`write_answer` wrote."""
    seen, holding, error = found["seen"], found["holding"], found["error"]
    return RefitAnswer(
        Reply(
            found["status"],
            str(found["why"]),
            None if seen is None else Epoch(*seen),
            str(found["digest"]),
            None if holding is None else _read_holding(*holding),
        ),
        None if error is None else read_error(error),
        {int(stage): _read_stats(stats) for stage, stats in found["stats"]},
        _read_times(found["times"]),
    )


def write_info(info: RankInfo) -> Document:
    """What a rank says of itself, as a JSON value."""
    metas = None if info.metas is None else [_fields(meta) for meta in info.metas]
    return {**_fields(info), "metas": metas}


def read_info(found: Document) -> RankInfo:
    """What :func:`write_info` wrote."""
    metas = found["metas"]
    if metas is not None:
        metas = tuple(TensorMeta(**{**meta, "shape": tuple(meta["shape"])}) for meta in metas)
    return RankInfo(**{**found, "metas": metas, "times": _read_times(found["times"])})


def write_error(error: BaseException) -> Document:
    """An error by the name of its type, and its words."""
    return {"type": type(error).__name__, "message": str(error)}


def read_error(found: Document) -> DprimsError:
    """The error of dprims that has this name; RefitAborted, which says the name, for any other."""
    name, message = str(found["type"]), str(found["message"])
    kind = getattr(exceptions, name, None)
    if isinstance(kind, type) and issubclass(kind, DprimsError):
        return kind(message)
    return RefitAborted(f"{name}: {message}")


def write_report(report: RefitReport) -> Document:
    """A report as a JSON value, without what each bucket took, and without its trace."""
    found = _fields(report)
    found |= {"absent": list(report.absent.items()), "phases": dict(report.phases)}
    return {**found, "stages": None, "trace": None}


def read_report(found: Document) -> RefitReport:
    """What :func:`write_report` wrote."""
    return RefitReport(
        **{
            **found,
            "epoch": Epoch(*found["epoch"]),
            "members": tuple(found["members"]),
            "absent": {int(shard): str(why) for shard, why in found["absent"]},
            "stages": {},
        }
    )


def _fields(value: Any) -> Document:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _read_holding(live: Any, staged: Any, paused: Any) -> Holding:
    return Holding(
        None if live is None else Version(*live),
        None if staged is None else Staged(Epoch(*staged[0]), Version(*staged[1])),
        bool(paused),
    )


def _read_times(found: Any) -> Times | None:
    return None if found is None else Times(float(found[0]), float(found[1]), str(found[2]))


def _write_stats(stats: TransferStats) -> Document:
    return _fields(stats)


def _read_stats(found: Mapping[str, Any]) -> TransferStats:
    try:
        return TransferStats(**{**found, "spans": [Span(*span) for span in found["spans"]]})
    except TypeError as error:
        raise RefitError(f"not the figures of a transfer: {error}") from error
