"""From facts to findings. Every check is a function of facts alone: no clock, no input or output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ._check_backend import check_backend
from ._check_environment import check_environment
from ._check_network import check_network
from .facts import TORCH_LIMIT_S, DriverFacts, EtcdFacts, Facts, SystemFacts, TorchFacts
from .findings import Finding, find

EPOCH_S = 1_735_689_600.0
"""2025-01-01: a wall clock that says less was never set."""
SHM_LEAST = 512 << 20
FILES_LEAST = 4096


class Extra(NamedTuple):
    """An optional dependency: which extra brings it, and what does not work without it."""

    extra: str
    package: str
    least: tuple[int, ...]
    without: str


EXTRAS = (
    Extra("torch", "torch", (2, 11), "no refits, no meshes, no tcpstore://"),
    Extra("redis", "redis", (5,), "no redis://"),
    Extra("etcd", "etcd3", (0, 12), "no etcd://"),
    Extra("ray", "ray", (2, 9), "no dprims.engines.ray"),
    Extra("metrics", "prometheus-client", (0, 20), "no metrics"),
    Extra("cli", "typer", (0, 28), "no command line but python -m dprims.doctor"),
    Extra("cli", "rich", (13,), "tables without colour"),
)
"""A test compares it with pyproject.toml."""

PROVIDED_BY = {"etcd3": ("etcd3-fc",), "redis": ("valkey",)}
"""Other distributions that do as well."""


def diagnose(facts: Facts) -> list[Finding]:
    """Everything that there is to say about *facts*, by topic."""
    return [
        *check_system(facts.system),
        *check_packages(facts),
        *(check_etcd(facts.etcd) if facts.etcd else ()),
        *(check_torch(facts.torch) if facts.torch else ()),
        *check_gpus(facts.driver, facts.torch),
        *check_environment(facts.environment, facts.network),
        *check_network(facts.network),
        *check_backend(facts.backend),
    ]


def check_system(system: SystemFacts) -> Iterator[Finding]:
    """Interpreter, platform, clock, limits."""
    yield find("python-ok", version=system.python, platform=system.platform, dprims=system.dprims)
    if system.platform != "linux":
        yield find("platform", platform=system.platform)
    if system.wall_clock < EPOCH_S:
        yield find("clock-unset", date=system.date)
    if system.shm_bytes is not None and system.shm_bytes < SHM_LEAST:
        yield find("shm-small", mib=system.shm_bytes >> 20)
    if system.open_files is not None and system.open_files < FILES_LEAST:
        yield find("files-few", count=system.open_files)


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Which extras are there."""
    for extra, package, least, without in EXTRAS:
        names = (package, *PROVIDED_BY.get(package, ()))
        name = next((name for name in names if name in facts.packages), None)
        if name is None:
            yield find("extra-missing", extra=extra, package=package, without=without)
        elif name == package and version_of(facts.packages[name]) < least:
            wanted = ".".join(map(str, least))
            yield find("extra-old", extra=extra, package=name, version=facts.packages[name], least=wanted)
        else:
            yield find("extra-ok", extra=extra, package=name, version=facts.packages[name])


def check_etcd(etcd: EtcdFacts) -> Iterator[Finding]:
    """Whether etcd3's messages load under this protobuf."""
    seen = {
        "package": etcd.package,
        "version": etcd.version,
        "protobuf": etcd.protobuf,
        "implementation": etcd.implementation,
    }
    yield find("etcd-broken", error=etcd.error, **seen) if etcd.error else find("etcd-ok", **seen)


def check_torch(torch: TorchFacts) -> Iterator[Finding]:
    """What torch brings."""
    if torch.hung:
        yield find("torch-hangs", seconds=TORCH_LIMIT_S)
        return
    if torch.error:
        yield find("torch-broken", version=torch.version, error=torch.error)
        return
    if not torch.distributed or not torch.gloo:
        missing = "gloo" if torch.distributed else "torch.distributed"
        yield find("torch-no-distributed", version=torch.version, missing=missing)
    yield find(
        "torch-ok",
        version=torch.version,
        gloo="yes" if torch.gloo else "no",
        nccl=torch.nccl or "no",
        cuda=torch.cuda or "no",
    )
    if torch.nccl and (2, 25) <= version_of(torch.nccl) < (2, 26, 2):
        yield find("nccl-abort-hangs", version=torch.nccl)


def check_gpus(driver: DriverFacts | None, torch: TorchFacts | None) -> Iterator[Finding]:
    """What the driver has, and whether torch can use it."""
    if driver is None or (not driver.gpus and not driver.error):
        yield find("gpu-none")
        return
    if driver.error:
        yield find("gpu-smi-fails", error=driver.error)
        return
    count, known = len(driver.gpus), torch is not None and not torch.error and not torch.hung
    yield find(
        "gpu-ok",
        count=count,
        names=", ".join(sorted({gpu.name for gpu in driver.gpus})),
        driver=driver.driver,
    )
    if torch is not None and known and not torch.cuda:
        yield find("gpu-cpu-torch", count=count, version=torch.version)
    elif torch is not None and known and not torch.devices:
        yield find(
            "gpu-unusable",
            count=count,
            driver=driver.driver,
            version=torch.version,
            cuda=torch.cuda,
            error=torch.device_error or "it says no more",
        )
    if cut := [place for place, gpu in enumerate(driver.gpus) if gpu.mig]:
        yield find("gpu-mig", places=", ".join(map(str, cut)))
    modes: dict[str, list[int]] = {}
    for place, gpu in enumerate(driver.gpus):
        if gpu.compute_mode != "Default":
            modes.setdefault(gpu.compute_mode, []).append(place)
    for mode, places in modes.items():
        yield find("gpu-exclusive", places=", ".join(map(str, places)), mode=mode)


def version_of(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
