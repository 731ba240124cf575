"""What the doctor looks at: plain values, gathered by :mod:`dprims.doctor.gather`, judged by the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TORCH_LIMIT_S = 90.0
"""How long torch may take to be imported and to say what it has."""


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """This machine and this interpreter."""

    python: str
    platform: str
    dprims: str
    wall_clock: float
    """Unix seconds."""
    date: str
    """The same, as people read it."""
    shm_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    open_files: int | None
    """How many files a process may open; None for any number."""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What torch says of itself."""

    version: str
    cuda: str = ""
    """The CUDA that it is built for; empty for none."""
    nccl: str = ""
    """The version of NCCL that it brings; empty for none."""
    gloo: bool = False
    distributed: bool = False
    devices: tuple[str, ...] = ()
    """Names of the GPUs that it can use."""
    device_error: str = ""
    error: str = ""
    """Why it cannot be imported; then nothing else is known."""
    hung: bool = False
    """Whether it did not answer in time."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver sees it."""

    name: str
    mig: bool = False
    compute_mode: str = "Default"


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """What ``nvidia-smi`` says."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class EtcdFacts:
    """The etcd3 package, and whether its stubs load."""

    package: str
    version: str
    protobuf: str
    implementation: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of the resolver: addresses or names, after so many seconds."""

    found: tuple[str, ...] = ()
    seconds: float = 0.0
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Names and addresses of this machine."""

    host: str
    forward: Lookup
    """The host name's addresses."""
    mine: tuple[str, ...]
    """Those of them that are on this machine."""
    chosen: str
    """The address that a leader here would be reached at; empty when there is none."""
    chosen_error: str
    reverse: Lookup
    """The names of that address."""
    localhost: tuple[str, ...]
    interfaces: tuple[str, ...]
    families: tuple[str, ...]
    """``AF_INET`` and ``AF_INET6``, as far as this machine has addresses of them."""
    master: Lookup | None = None
    """What ``MASTER_ADDR`` resolves to; None when it is not set."""


@dataclass(frozen=True, slots=True)
class Reach:
    """One address of a backend: whether a plain connection to it succeeds."""

    host: str
    port: int
    """0 for a socket file, whose path is *host*."""
    error: str = ""
    """Empty where it does; ``name``, ``refused``, ``missing`` or ``unreachable`` otherwise."""
    words: str = ""


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What came of using a backend."""

    url: str
    """Without secrets."""
    reach: tuple[Reach, ...] = ()
    error: str = ""
    """What was raised, in one line; empty when all went well."""
    error_type: str = ""
    """``BackendUnavailable``, ``BackendMisconfigured``, another type's name, ``hung`` or ``crashed``."""
    guarantees: Mapping[str, object] = field(default_factory=dict)
    round_trips_s: tuple[float, ...] = ()
    lock_s: float | None = None
    lock_error: str = ""
    version: str = ""
    clock_off_s: float | None = None
    """Server's wall clock minus ours; None when the server tells none."""
    clock_error_s: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything."""

    system: SystemFacts
    packages: Mapping[str, str]
    """Version by name of the distribution, of those that are installed."""
    environment: Mapping[str, str]
    network: NetworkFacts
    torch: TorchFacts | None = None
    """None: not installed."""
    driver: DriverFacts | None = None
    """None: there is no ``nvidia-smi``."""
    etcd: EtcdFacts | None = None
    """None: not installed."""
    backend: BackendFacts | None = None
    """None: no URL was given."""
