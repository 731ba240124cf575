"""Every line that the doctor can print, from facts; and the page that explains them."""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dprims.doctor.checks import EXTRAS, diagnose
from dprims.doctor.facts import (
    BackendFacts,
    DriverFacts,
    EtcdFacts,
    Facts,
    Gpu,
    Lookup,
    NetworkFacts,
    Reach,
    SystemFacts,
    TorchFacts,
)
from dprims.doctor.findings import LEVELS, RULES, Finding, find
from dprims.doctor.report import as_json, as_text, status_of, without_secrets, worst
from dprims.doctor.secrets import secrets_of, shown

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"
START = "<!-- findings: written by python tests/test_doctor_rules.py -->\n"
END = "<!-- end of findings -->"

PROMISES = {
    "scope": "hosts",
    "survives_restart": True,
    "tokens_survive_restart": False,
    "min_ttl": 2.0,
    "detects_killed_holder": "its ttl",
    "clock": "the server",
    "limits": "much",
}
SYSTEM = SystemFacts("3.12.1", "linux", "0.1.0", 1.8e9, "2027-01-15", 8 << 30, 65536)
TORCH = TorchFacts("2.13.0", "13.0", "2.28.9", True, True, ("H200",))
DRIVER = DriverFacts("580.1", (Gpu("H200"), Gpu("H200")))
NETWORK = NetworkFacts(
    host="node-7",
    forward=Lookup(("10.0.0.7",), 0.001),
    mine=("10.0.0.7",),
    chosen="10.0.0.7",
    chosen_error="",
    reverse=Lookup(("node-7",), 0.001),
    localhost=("127.0.0.1", "::1"),
    interfaces=("lo", "eth0", "docker0"),
    families=("AF_INET", "AF_INET6"),
)
BACKEND = BackendFacts(
    "redis://h:6379",
    (Reach("h", 6379),),
    guarantees=PROMISES,
    round_trips_s=(0.001, 0.002, 0.003),
    lock_s=0.004,
    version="7.2.4",
    clock_off_s=0.01,
    clock_error_s=0.002,
    settings={"server": "redis", "role": "master", "aof_enabled": "1"},
)
FINE = Facts(
    system=SYSTEM,
    packages={
        "torch": "2.13.0",
        "redis": "8.1",
        "etcd3": "0.12.0",
        "ray": "2.60",
        "prometheus-client": "0.26",
    }
    | {"typer": "0.29", "rich": "15.0"},
    environment={},
    network=NETWORK,
    torch=TORCH,
    driver=DRIVER,
    etcd=EtcdFacts("etcd3", "0.12.0", "7.36.2", "upb"),
    backend=BACKEND,
)


def system(**more: Any) -> Facts:
    return replace(FINE, system=replace(SYSTEM, **more))


def network(**more: Any) -> Facts:
    return replace(FINE, network=replace(NETWORK, **more))


def backend(**more: Any) -> Facts:
    return replace(FINE, backend=replace(BACKEND, **more))


def unreached(error: str, words: str = "") -> Facts:
    return replace(FINE, backend=BackendFacts("redis://h:1", (Reach("h", 1, error, words),)))


def failed(error_type: str, error: str = "words") -> Facts:
    return replace(
        FINE, backend=BackendFacts("redis://h:1", (Reach("h", 1),), error=error, error_type=error_type)
    )


def redis(**settings: str) -> Facts:
    return backend(settings={"server": "redis", **settings})


def env(**variables: str) -> Facts:
    return replace(FINE, environment=variables)


V6 = network(
    forward=Lookup(("2001:db8::7",)),
    mine=("2001:db8::7",),
    chosen="2001:db8::7",
    localhost=("::1", "127.0.0.1"),
)

# For each rule, facts that bring it about.
CASES: dict[str, Facts] = {
    "python-ok": FINE,
    "platform": system(platform="darwin"),
    "clock-unset": system(wall_clock=12.0, date="1970-01-01"),
    "shm-small": system(shm_bytes=64 << 20),
    "files-few": system(open_files=1024),
    "extra-ok": FINE,
    "extra-missing": replace(FINE, packages={}, torch=None, etcd=None),
    "extra-old": replace(FINE, packages={**FINE.packages, "torch": "2.9.1+cu128"}),
    "etcd-ok": FINE,
    "etcd-broken": replace(FINE, etcd=EtcdFacts("etcd3", "0.12.0", "4.21.1", "upb", "TypeError: no")),
    "torch-ok": FINE,
    "torch-broken": replace(FINE, torch=TorchFacts("2.13.0", error="ImportError: libcudart.so.13")),
    "torch-hangs": replace(FINE, torch=TorchFacts("2.13.0", hung=True)),
    "torch-no-distributed": replace(FINE, torch=TorchFacts("2.13.0")),
    "gpu-ok": FINE,
    "gpu-none": replace(FINE, driver=None),
    "gpu-smi-fails": replace(FINE, driver=DriverFacts(error="Failed to initialize NVML")),
    "gpu-unusable": replace(FINE, torch=replace(TORCH, devices=(), device_error="driver is too old")),
    "gpu-cpu-torch": replace(FINE, torch=replace(TORCH, version="2.13.0+cpu", cuda="", nccl="", devices=())),
    "gpu-mig": replace(FINE, driver=DriverFacts("580.1", (Gpu("H200"), Gpu("H200", mig=True)))),
    "gpu-exclusive": replace(FINE, driver=DriverFacts("580.1", (Gpu("H200", False, "Exclusive_Process"),))),
    "nccl-abort-hangs": replace(FINE, torch=replace(TORCH, nccl="2.25.1")),
    "host-ok": FINE,
    "host-unresolvable": network(forward=Lookup(), mine=()),
    "host-loopback": network(forward=Lookup(("127.0.1.1",)), mine=("127.0.1.1",)),
    "host-elsewhere": network(forward=Lookup(("10.0.0.9",)), mine=()),
    "host-only-loopback": network(forward=Lookup(), mine=(), chosen="127.0.0.1"),
    "host-none": network(chosen="", chosen_error="no address at all"),
    "lookup-slow": network(forward=Lookup(("10.0.0.7",), 5.01)),
    "reverse-slow": network(reverse=Lookup((), 6.0, timed_out=True)),
    "localhost-v6": network(localhost=("::1",)),
    "address-v6": V6,
    "backend-none": replace(FINE, backend=None),
    "backend-ok": FINE,
    "backend-lock": FINE,
    "backend-lock-fails": backend(lock_s=None, lock_error="NOPERM"),
    "backend-guarantees": FINE,
    "backend-limits": FINE,
    "latency-ok": FINE,
    "latency-high": backend(round_trips_s=(0.2, 0.1, 0.3)),
    "name-unknown": unreached("name"),
    "refused": unreached("refused"),
    "unreachable": unreached("unreachable", "timed out"),
    "socket-missing": unreached("missing", "No such file or directory"),
    "silent": failed("BackendUnavailable"),
    "rejected": failed("BackendMisconfigured"),
    "extra-needed": failed("MissingExtra"),
    "failed": failed("ZeroDivisionError"),
    "clock-ok": FINE,
    "clock-off": backend(clock_off_s=-3600.0),
    "clock-none": backend(clock_off_s=None),
    "redis-old": backend(version="5.0.14"),
    "redis-replica": redis(role="slave", master="h:6380"),
    "redis-evicts": redis(maxmemory="100", maxmemory_policy="allkeys-lru"),
    "redis-forgets": redis(aof_enabled="0"),
    "etcd-no-leader": failed("BackendUnavailable", "etcdserver: no leader"),
    "etcd-full": backend(settings={"server": "etcd", "leader": "one", "alarms": "NOSPACE"}),
    "process-only": backend(guarantees={**PROMISES, "scope": "process"}),
    "env-ok": FINE,
    "env-interface-missing": env(NCCL_SOCKET_IFNAME="ib"),
    "env-interface-loopback": env(GLOO_SOCKET_IFNAME="lo"),
    "env-nccl-family": replace(
        network(families=("AF_INET",)), environment={"NCCL_SOCKET_FAMILY": "AF_INET6"}
    ),
    "env-master-unresolvable": replace(network(master=Lookup()), environment={"MASTER_ADDR": "nowhere"}),
    "env-master-loopback": replace(
        network(master=Lookup(("127.0.0.1",))),
        environment={"MASTER_ADDR": "localhost", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
    ),
    "env-mig": env(CUDA_VISIBLE_DEVICES="MIG-c7384736-a75d-5afc-978f-d2f1294409fd"),
    "env-torch-nccl-blocking-wait": env(TORCH_NCCL_BLOCKING_WAIT="1"),
    "env-torch-nccl-async-error-handling-0": env(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
    "env-torch-nccl-async-error-handling-kill": env(TORCH_NCCL_ASYNC_ERROR_HANDLING="3"),
    "env-torch-nccl-async-error-handling-abort": env(NCCL_ASYNC_ERROR_HANDLING="2"),
    "env-torch-nccl-enable-monitoring": env(TORCH_NCCL_ENABLE_MONITORING="0"),
    "env-torch-nccl-heartbeat-timeout-sec": env(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="10"),
    "env-torch-nccl-use-comm-nonblocking": env(TORCH_NCCL_USE_COMM_NONBLOCKING="1"),
    "env-torch-nccl-dump-on-timeout": env(TORCH_NCCL_DUMP_ON_TIMEOUT="1"),
    "env-torch-nccl-propagate-error": env(TORCH_NCCL_PROPAGATE_ERROR="true"),
    "env-torch-nccl-rethrow-cuda-errors": env(TORCH_NCCL_RETHROW_CUDA_ERRORS="0"),
    "env-torch-distributed-debug": env(TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    "env-cuda-launch-blocking": env(CUDA_LAUNCH_BLOCKING="1"),
    "env-cuda-visible-devices-none": env(CUDA_VISIBLE_DEVICES=""),
    "env-nccl-comm-blocking": env(NCCL_COMM_BLOCKING="0"),
    "env-nccl-hostid": env(NCCL_HOSTID="h3"),
    "env-nccl-p2p-disable": env(NCCL_P2P_DISABLE="1"),
    "env-nccl-shm-disable": env(NCCL_SHM_DISABLE="1"),
    "env-nccl-ib-disable": env(NCCL_IB_DISABLE="1"),
    "env-nccl-nvls-enable": env(NCCL_NVLS_ENABLE="0"),
    "env-nccl-proto": env(NCCL_PROTO="LL"),
    "env-nccl-max-nchannels": env(NCCL_MAX_NCHANNELS="2"),
    "env-nccl-max-ctas": env(NCCL_MAX_CTAS="4"),
    "env-nccl-debug": env(NCCL_DEBUG="INFO"),
    "env-protocol-buffers-python-implementation": env(PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python"),
}


@pytest.mark.parametrize("code", RULES)
def test_each_rule_is_found(code: str) -> None:
    found = [one for one in diagnose(CASES[code]) if one.code == code]
    assert found, f"no check ever says {code}"
    rule = RULES[code]
    for one in found:
        assert (one.level, one.topic) == (rule.level, rule.topic)
        assert one.what
        assert "{" not in one.what + one.do
        assert bool(one.do) or one.level in ("ok", "note"), "what is wrong is said with what to do"


def test_every_case_is_of_a_rule() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("code", [code for code, rule in RULES.items() if rule.level != "ok"])
def test_a_fine_set_up_has_none_of_it(code: str) -> None:
    allowed = {"backend-limits"}  # said of every backend
    assert code in allowed or code not in {one.code for one in diagnose(FINE)}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCH_NCCL_BLOCKING_WAIT", "0"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "long"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "no"),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_P2P_DISABLE", "0"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_FAMILY", "AF_INET6"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("MASTER_ADDR", "h"),
    ],
)
def test_a_harmless_value_is_not_reported(variable: str, value: str) -> None:
    facts = replace(network(master=Lookup(("10.0.0.1",))), environment={variable: value})
    assert [one.code for one in diagnose(facts) if one.topic == "environment"] == ["env-ok"]


@pytest.mark.parametrize("value", ["=eth", "^eth,lo,docker", "eno1,ib0"])
def test_names_of_interfaces_are_read_as_nccl_reads_them(value: str) -> None:
    assert "env-interface-missing" in {one.code for one in diagnose(env(NCCL_SOCKET_IFNAME=value))}


def test_an_old_name_of_a_variable_counts() -> None:
    (found,) = [one for one in diagnose(env(NCCL_BLOCKING_WAIT="yes")) if one.topic == "environment"]
    assert found.what.startswith("NCCL_BLOCKING_WAIT=yes: ")
    assert found.level == "error"


def test_one_of_several_endpoints_down_is_said_beside_what_works() -> None:
    reach = (Reach("a", 2379, "refused"), Reach("b", 2379))
    codes = {one.code for one in diagnose(backend(reach=reach))}
    assert {"refused", "backend-ok"} <= codes


def test_levels_and_exit_statuses() -> None:
    def of(*levels: str) -> list[Finding]:
        return [Finding("system", "x", level, "what", "do") for level in levels]  # type: ignore[arg-type]

    assert worst([]) == "ok"
    assert worst(of("note", "error", "warning")) == "error"
    assert [status_of(of(level)) for level in LEVELS] == [0, 0, 0, 1]
    assert [status_of(of(level), strict=True) for level in LEVELS] == [0, 0, 1, 1]


def test_text_and_json_have_everything() -> None:
    findings = diagnose(CASES["redis-evicts"])
    text = as_text(findings)
    document = json.loads(as_json(findings))
    assert document["worst"] == "warning"
    assert [one["code"] for one in document["findings"]] == [one.code for one in findings]
    flat = " ".join(text.split())
    for one in findings:
        assert f"[{one.code}]" in text
        assert " ".join(one.do.split()) in flat
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:hunter2@h:1/0", "redis://:***@h:1/0"),
        ("etcd://me:hun%21ter@a:1,b:2/p?timeout=3", "etcd://me:***@a:1,b:2/p?timeout=3"),
        ("redis://h:1?password=hunter2&db=1", "redis://h:1?password=***&db=1"),
        ("unix:///s?db=1&ssl_password=hunter2", "unix:///s?db=1&ssl_password=***"),
        ("redis://u:p@h", "redis://u:***@h"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, wanted: str) -> None:
    assert shown(url) == wanted


def test_a_secret_is_taken_out_of_whatever_says_it() -> None:
    secrets = secrets_of("etcd://me:hun%21ter@a:1")
    assert secrets == {"hun%21ter", "hun!ter"}
    said = find("rejected", url="u", error="user me with hun!ter (hun%21ter) is not known")
    (clean,) = without_secrets([said], secrets)
    assert clean.what == "u refuses: user me with *** (***) is not known"


def test_the_extras_are_those_of_the_package() -> None:
    declared = (PAGE.parents[1] / "pyproject.toml").read_text()
    for extra, package, least, _ in EXTRAS:
        (line,) = [line for line in declared.splitlines() if line.startswith(f"{extra} = [")]
        assert f'"{package}>={".".join(map(str, least))}"' in line


# -- the page ------------------------------------------------------------------------------------------------


def table() -> str:
    lines: list[str] = []
    for topic in dict.fromkeys(rule.topic for rule in RULES.values()):
        lines += [f"\n### {topic}\n", "| code | level | what it says | what to do |", "|---|---|---|---|"]
        for rule in RULES.values():
            if rule.topic == topic:
                cells = (f"`{rule.code}`", rule.level, _cell(rule.says), _cell(rule.do))
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n"


def _cell(text: str) -> str:
    """A sentence with its facts as words in italics."""
    parts: Iterator[Any] = string.Formatter().parse(text)
    said = ""
    for literal, name, _, _ in parts:
        said += literal.replace("|", "\\|") + (f"*{name}*" if name else "")
    return said


def page_with(text: str) -> str:
    before, _, rest = PAGE.read_text().partition(START)
    return before + START + text + END + rest.partition(END)[2]


def test_the_page_has_every_finding() -> None:
    text = PAGE.read_text()
    assert text.count(START) == text.count(END) == 1
    assert text == page_with(table()), f"out of date: run python tests/{Path(__file__).name}"


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.write_text(page_with(table()))} bytes\n")
