"""The environment variables that change what a refit does. dprims sets none of them; it only looks.

What is said of torch's and NCCL's variables is what they do to a private group under dprims' own guard, whose
deadline comes long before torch's: see ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..synchronizer.environment import BLOCKING_WAIT, is_on
from .rule import Level, Rule


def _is_off(value: str) -> bool:
    return not is_on(value)


def _any(value: str) -> bool:
    return True


def _is(*wanted: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in wanted


def _below(limit: float) -> Callable[[str], bool]:
    def below(value: str) -> bool:
        try:
            return float(value) < limit
        except ValueError:
            return False

    return below


class Variable(NamedTuple):
    """One effect of one variable: it holds when the variable is set and *when* says so of its value."""

    names: tuple[str, ...]
    """The first is its name today, the others are what it was called before and may still be."""
    when: Callable[[str], bool]
    level: Level
    says: str
    do: str
    suffix: str = ""

    @property
    def code(self) -> str:
        """The code of the rule."""
        return f"env-{self.names[0].lower().replace('_', '-')}{self.suffix}"


_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")

VARIABLES = (
    Variable(
        BLOCKING_WAIT, is_on, "error",
        "waits block in torch, where no guard sees them: a weight group over NCCL refuses to be built",
        "unset {name} for every rank",
    ),
    Variable(
        _HANDLING, _is("0"), "note",
        "torch's watchdog leaves a stuck collective alone; in a refit dprims' guard aborts it all the same, "
        "your own groups hang",
        "leave it unset, unless your own code aborts its groups", "-0",
    ),
    Variable(
        _HANDLING, _is("1", "3"), "note",
        "torch's watchdog ends the process when a collective of your own groups fails or times out; weight "
        "groups are made so that it leaves them to dprims' guard",
        "nothing", "-kill",
    ),
    Variable(
        _HANDLING, _is("2"), "note",
        "torch's watchdog aborts a collective of your own groups that fails or times out, and lets the "
        "process live; weight groups are left to dprims' guard",
        "nothing", "-abort",
    ),
    Variable(
        ("TORCH_NCCL_ENABLE_MONITORING",), _is_off, "note",
        "nobody watches torch's watchdog: a process whose abort never returns is not ended by torch",
        "replace a rank that raised DeviceLost by yourself, as always",
    ),
    Variable(
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",), _below(60), "warning",
        "torch ends the process when its watchdog is silent for {value} s, which an abort of a frozen peer "
        "or a "
        "long CUDA call can take: a survivor may die with the shard that was lost",
        "leave it at 480, or set at least 60",
    ),
    Variable(
        ("TORCH_NCCL_USE_COMM_NONBLOCKING",), is_on, "warning",
        "communicators are made without blocking: NCCL 2.26 is known to hang in that, and a build then ends "
        "only at the refit's deadline",
        "unset it",
    ),
    Variable(
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",), is_on, "note",
        "when a collective of your own times out, torch raises a flag in the job's store, at which the "
        "monitors of other ranks end their processes; a refit's collectives never time out",
        "nothing",
    ),
    Variable(
        ("TORCH_NCCL_PROPAGATE_ERROR",), is_on, "note",
        "torch tells errors to other ranks through the store; refits have the decision cell for that and "
        "do not "
        "read it",
        "nothing",
    ),
    Variable(
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS",), _is_off, "note",
        "torch's watchdog keeps CUDA errors to itself; a refit finds them by its own events",
        "nothing",
    ),
    Variable(
        ("TORCH_DISTRIBUTED_DEBUG",), _is("detail"), "note",
        "torch checks and logs every collective of your own groups, slowly; weight groups are raw and "
        "unaffected",
        "unset it in production",
    ),
    Variable(
        ("CUDA_LAUNCH_BLOCKING",), _is("1"), "warning",
        "every launch waits for its kernel: nothing overlaps, and a broadcast to a lost peer blocks inside "
        "the "
        "launch until it is aborted",
        "unset it",
    ),
    Variable(
        ("CUDA_VISIBLE_DEVICES",), _is("", "-1", "none", "nodevfiles"), "warning",
        "no GPU is visible to this process",
        "unset it, or name the GPUs of this rank", "-none",
    ),
    Variable(
        ("NCCL_COMM_BLOCKING",), _is("0"), "warning",
        "communicators are made without blocking: NCCL 2.26 is known to hang in that",
        "unset it",
    ),
    Variable(
        ("NCCL_HOSTID",), _any, "warning",
        "NCCL is told on which host it is ({value}): ranks of one host with different values talk through "
        "sockets "
        "(some GB/s, where NVLink gives hundreds)",
        "unset it, unless several test ranks have to share a GPU",
    ),
    Variable(
        ("NCCL_P2P_DISABLE",), _is("1"), "warning",
        "GPUs of one host do not reach each other over NVLink or PCIe: weights go through host memory",
        "unset it",
    ),
    Variable(
        ("NCCL_SHM_DISABLE",), _is("1"), "warning",
        "ranks of one host without peer-to-peer access talk through sockets instead of shared memory",
        "unset it, and give the container a larger /dev/shm if that was why",
    ),
    Variable(
        ("NCCL_IB_DISABLE",), _is("1"), "note",
        "between hosts weights go through TCP sockets, also where there is InfiniBand or RoCE",
        "unset it where the hosts have such a network",
    ),
    Variable(
        ("NCCL_NVLS_ENABLE",), _is("0"), "note",
        "NVLink multicast is off; it serves reductions, and refits are broadcasts",
        "nothing",
    ),
    Variable(
        ("NCCL_PROTO",), _is("ll", "ll128", "ll,ll128", "ll128,ll"), "warning",
        "NCCL may only use {value}, a protocol for small messages: buckets of 1 GiB travel at a part of the "
        "link's speed",
        "unset it",
    ),
    Variable(
        ("NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS"), _below(8), "warning",
        "NCCL may use {value} channels, too few to fill NVLink",
        "unset it",
    ),
    Variable(
        ("NCCL_MAX_CTAS",), _below(8), "warning",
        "NCCL may use {value} blocks of the GPU, too few to fill NVLink",
        "unset it",
    ),
    Variable(
        ("NCCL_DEBUG",), _is("info", "trace"), "note",
        "NCCL logs every group that is built, on every rank",
        "set WARN in production",
    ),
    Variable(
        ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION",), _is("python"), "note",
        "protobuf is the slow one for everybody in this process; dprims' etcd backend does not need that",
        "unset it",
    ),
)  # fmt: skip
"""Checked in this order, each by itself."""

SPECIAL = (
    Rule(
        "environment", "env-ok", "note",
        "of {count} variables that change what a refit does none is set",
    )._replace(level="ok"),
    Rule(
        "environment", "env-interface-missing", "error",
        "{name}={value} names no interface of this machine (there are {interfaces}): {who} cannot connect",
        "name one of them, or unset it",
    ),
    Rule(
        "environment", "env-interface-loopback", "warning",
        "{name}={value}: {who} uses the loopback interface, so all ranks have to be on this machine",
        "unset it, unless this is a test on one machine",
    ),
    Rule(
        "environment", "env-nccl-family", "error",
        "NCCL_SOCKET_FAMILY={value}, and this machine has no address of that family",
        "unset it",
    ),
    Rule(
        "environment", "env-master-unresolvable", "error",
        "MASTER_ADDR={value} does not resolve here: init_process_group, and with it the store that a lock "
        "without "
        "a backend lives in, waits until its timeout",
        "set an address, or a name that every host resolves",
    ),
    Rule(
        "environment", "env-master-loopback", "error",
        "MASTER_ADDR={value} is this machine itself, and WORLD_SIZE={world} is more than "
        "LOCAL_WORLD_SIZE={local}: "
        "every host waits for its own rank 0",
        "set an address of rank 0's host that the others reach",
    ),
    Rule(
        "environment", "env-mig", "warning",
        "CUDA_VISIBLE_DEVICES={value} names a slice of a GPU (MIG): slices have no peer-to-peer access, "
        "and a "
        "process sees one of them only",
        "give refits whole GPUs, or expect the speed of sockets",
    ),
)  # fmt: skip

ENVIRONMENT = (
    *SPECIAL,
    *(
        Rule(
            "environment",
            one.code,
            one.level,
            "{name}={value}: " + one.says,
            one.do if one.do != "nothing" else "",
        )
        for one in VARIABLES
    ),
)
