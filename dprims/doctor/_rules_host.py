"""What can be found of this machine: Python, packages, torch, GPUs, names and addresses."""

from __future__ import annotations

from .rule import Rule

HOST = (
    Rule("system", "python-ok", "ok", "Python {version} on {platform}, dprims {dprims}"),
    Rule(
        "system", "platform", "warning", "this is {platform}; dprims is tested on Linux alone",
        "run it on Linux: clocks, signals and process deaths differ elsewhere",
    ),
    Rule(
        "system", "clock-unset", "warning", "the wall clock of this machine says {date}",
        "set it (chrony, ntpd): tokens of a TCPStore are made from it, and times in listings are shown by it",
    ),
    Rule(
        "system", "shm-small", "warning",
        "/dev/shm has {mib} MiB: NCCL's and torch's shared memory between ranks of one host does not fit",
        "start the container with --shm-size=1g or more, or --ipc=host",
    ),
    Rule(
        "system", "files-few", "note",
        "a process may open {count} files: a leader or a store has several for each rank",
        "raise it for large fleets: ulimit -n 65536",
    ),
    Rule("packages", "extra-ok", "ok", "{extra}: {package} {version}"),
    Rule(
        "packages", "extra-missing", "note", "{extra}: {package} is not installed; {without}",
        "pip install 'dprims[{extra}]', if that is wanted",
    ),
    Rule(
        "packages", "extra-old", "error", "{extra}: {package} {version} is older than {least}",
        "pip install -U 'dprims[{extra}]'",
    ),
    Rule(
        "packages", "etcd-ok", "ok",
        "{package} {version} loads under protobuf {protobuf} ({implementation})",
    ),
    Rule(
        "packages", "etcd-broken", "error",
        "{package} {version} does not load under protobuf {protobuf} ({implementation}): {error}",
        "pip install -U 'protobuf>=4.22' (or <3.21), or pip install -U 'dprims[etcd]'",
    ),
    Rule(
        "torch", "torch-ok", "ok",
        "torch {version}: gloo {gloo}, NCCL {nccl}, built for CUDA {cuda}",
    ),
    Rule(
        "torch", "torch-broken", "error", "torch {version} cannot be imported: {error}",
        "install it anew; LD_LIBRARY_PATH and a mixture of CUDA packages are usual causes",
    ),
    Rule(
        "torch", "torch-hangs", "error",
        "torch did not say what it has within {seconds:g} s",
        "look at the GPUs with nvidia-smi, and at the file system that torch is on",
    ),
    Rule(
        "torch", "torch-no-distributed", "error",
        "torch {version} was built without {missing}: there are no weight groups over it",
        "install a build from pytorch.org",
    ),
    Rule("torch", "gpu-ok", "ok", "{count} GPU(s), {names}; driver {driver}"),
    Rule("torch", "gpu-none", "note", "no NVIDIA GPU here: refits go over gloo"),
    Rule(
        "torch", "gpu-smi-fails", "error", "nvidia-smi fails: {error}",
        "repair the driver (a reboot after an update of it helps); ranks that touch the GPU would fail or "
        "hang",
    ),
    Rule(
        "torch", "gpu-unusable", "error",
        "{count} GPU(s) with driver {driver}, and torch {version} (CUDA {cuda}) can use none: {error}",
        "install a torch for a CUDA that the driver has, or a newer driver; see CUDA_VISIBLE_DEVICES, too",
    ),
    Rule(
        "torch", "gpu-cpu-torch", "warning",
        "{count} GPU(s), and torch {version} is built for CPUs: refits go over gloo, through host memory",
        "install a CUDA build of torch",
    ),
    Rule(
        "torch", "gpu-mig", "warning",
        "GPU(s) {places} are cut into slices (MIG): slices have no NVLink and no peer-to-peer access",
        "give refits whole GPUs, or expect the speed of sockets",
    ),
    Rule(
        "torch", "gpu-exclusive", "warning",
        "GPU(s) {places} take one process each (compute mode {mode})",
        "nvidia-smi -c DEFAULT, if a trainer and a shard are to share a GPU",
    ),
    Rule(
        "torch", "nccl-abort-hangs", "error",
        "NCCL {version}: its abort is known to hang, so a lost shard costs the survivors' processes",
        "use NCCL 2.26.2 or newer, which a newer torch brings",
    ),
    Rule(
        "network", "host-ok", "ok",
        "ranks reach this machine as {host} at {address}; looked up in {ms:.0f} ms, its name in "
        "{reverse_ms:.0f} ms",
    ),
    Rule(
        "network", "host-unresolvable", "warning",
        "the host name {host} does not resolve; dprims takes {address} instead, torchrun and others fail",
        "put the name and the address into /etc/hosts or DNS",
    ),
    Rule(
        "network", "host-loopback", "warning",
        "the host name {host} is {address}, which every host takes for itself; dprims takes {chosen} "
        "instead, "
        "others that are told the name do not",
        "map the name to the machine's own address in /etc/hosts",
    ),
    Rule(
        "network", "host-elsewhere", "warning",
        "the host name {host} is {address}, which is not on this machine; dprims takes {chosen} instead",
        "correct /etc/hosts or DNS, or pass host=",
    ),
    Rule(
        "network", "host-only-loopback", "warning",
        "the only address that dprims finds is {address}: ranks on other hosts cannot join a leader here",
        "give the machine a network, or pass host= with its address",
    ),
    Rule(
        "network", "host-none", "error", "dprims finds no address of this machine: {error}",
        "bring up the loopback interface at least: ip link set lo up",
    ),
    Rule(
        "network", "lookup-slow", "warning",
        "looking up the host name {host} took {seconds:.1f} s{limit}",
        "put the name into /etc/hosts, or correct the nameservers in /etc/resolv.conf",
    ),
    Rule(
        "network", "reverse-slow", "error",
        "looking up the name of {address} took {seconds:.1f} s{limit}: torch's store server does that for "
        "each "
        "client that connects, on the one thread that serves all of them, and stands still meanwhile",
        "put the addresses of all hosts into /etc/hosts, or set RES_OPTIONS='timeout:1 attempts:1' for the "
        "server",
    ),
    Rule(
        "network", "localhost-v6", "warning",
        "localhost is {addresses}: what listens at 127.0.0.1 is not found under that name",
        "write 127.0.0.1 in URLs, or put '127.0.0.1 localhost' into /etc/hosts",
    ),
    Rule(
        "network", "address-v6", "note",
        "ranks reach this machine over IPv6 alone ({address}): in URLs it stands in brackets, [{address}]",
    ),
)  # fmt: skip
