"""``dprims lock`` and ``dprims roster``, as programs, against a real server."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import dprims
from dprims.testing.servers import RedisServer

from .helpers.services import process_state, until

LIMIT = 60.0
ROOT = Path(__file__).resolve().parent.parent
DPRIMS = [sys.executable, "-m", "dprims"]
SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
BASH = Path("/bin/bash")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def backend(redis_server: RedisServer) -> Iterator[dprims.Backend]:
    with dprims.connect(redis_server.url) as backend:
        yield backend


@pytest.fixture
def name() -> str:
    return f"cli {uuid.uuid4().hex}"


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DPRIMS, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )


class Started:
    """A program that runs, and what it has said so far."""

    def __init__(self, *command: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0
        )
        self.said = b""

    def until_said(self, text: bytes) -> None:
        deadline = time.monotonic() + LIMIT
        while text not in self.said:
            assert select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]
            chunk = os.read(self.process.stdout.fileno(), 4096)
            assert chunk, (self.said, self.process.stderr.read())
            self.said += chunk

    def types(self, text: str) -> None:
        self.process.stdin.write(text.encode())

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, (self.said + out).decode(), err.decode()


def holding(url: str, name: str, script: str, *options: str) -> Started:
    """A shell script under the lock *name*, which has said "go"."""
    started = Started(
        *DPRIMS, "lock", "run", *options, url, name, "--", "/bin/sh", "-c", f"echo go; {script}"
    )
    started.until_said(b"go\n")
    return started


def shell_on_terminal() -> Started:
    return Started(sys.executable, "-c", SPAWN, str(BASH), "--norc", "--noprofile", "-i")


def stat(pid: int) -> list[str]:
    """State, parent, group, session, terminal, foreground group of the terminal, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# -- run ------------------------------------------------------------------------------------------


def test_run_exports_the_token_and_exits_as_the_command_does(redis_server: RedisServer, name: str) -> None:
    script = "cat; echo token $DPRIMS_TOKEN; echo err >&2; exit 7"
    run = subprocess.run(
        [*DPRIMS, "lock", "run", redis_server.url, name, "--", "/bin/sh", "-c", script],
        env=ENVIRONMENT,
        input="from stdin\n",
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert run.returncode == 7
    assert re.fullmatch(r"from stdin\ntoken \d{16,}\n", run.stdout)
    assert run.stderr == "err\n"


@pytest.mark.parametrize("between", [[], ["--"]])
def test_all_that_follows_the_name_belongs_to_the_command(
    redis_server: RedisServer, name: str, between: list[str]
) -> None:
    command = ["printf", "%s,", "-l", "--json", "--", "--help"]
    run = call("lock", "run", redis_server.url, name, *between, *command)
    assert (run.returncode, run.stdout, run.stderr) == (0, "-l,--json,--,--help,", "")


def test_the_url_is_that_of_the_environment_when_it_is_left_out(
    redis_server: RedisServer, backend: dprims.Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "DPRIMS_BACKEND", redis_server.url)
    assert call("lock", "run", name, "echo", "-n", "redis://no").stdout == "redis://no"
    with dprims.DistributedLock(name, backend) as grant:
        assert str(grant.token) in call("lock", "ls").stdout
        assert str(grant.token) in call("lock", "ls", name).stdout
        assert str(grant.token) in call("lock", "ls", redis_server.url).stdout
        assert f"{name} is held by" in call("lock", "show", name).stdout
        assert call("lock", "break", "--token", "1", name).returncode == 1
    assert call("roster", name, "--json").stdout == "[]\n"
    assert name not in call("status", "--json").stdout


def test_run_as_json(redis_server: RedisServer, name: str) -> None:
    run = call("lock", "run", "--json", redis_server.url, name, "--", "/bin/sh", "-c", "echo $DPRIMS_TOKEN")
    token, outcome = run.stdout.splitlines()
    assert json.loads(outcome) == {"name": name, "token": int(token), "status": 0, "lost": False}
    assert run.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("status", [0, 5])
def test_the_status_is_the_commands_though_the_json_could_not_be_written(
    redis_server: RedisServer, name: str, status: int
) -> None:
    command = [*DPRIMS, "lock", "run", "--json", redis_server.url, name, "sh", "-c", f"exit {status}"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT)
    assert run.returncode == status
    assert run.stderr == b"dprims lock run: cannot write its output: No space left on device\n"


def test_a_command_that_a_signal_killed(redis_server: RedisServer, name: str) -> None:
    assert (
        call("lock", "run", redis_server.url, name, "--", "/bin/sh", "-c", "kill -9 $$").returncode == 128 + 9
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(redis_server: RedisServer, name: str, number: signal.Signals) -> None:
    script = f"trap 'echo got; exit 5' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    with holding(redis_server.url, name, script) as run:
        run.until_said(b"ready")
        run.process.send_signal(number)
        assert run.end() == (5, "go\nready\ngot\n", "")


def test_the_lock_is_held_while_the_command_runs_and_free_afterwards(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    lock = dprims.DistributedLock(name, backend)
    with holding(redis_server.url, name, "read line", "--label", "me") as run:
        assert lock.owner().label == "me"
        assert lock.owner().pid == run.process.pid
        assert lock.owner().thread == "MainThread"
        run.process.stdin.write(b"\n")
        assert run.end()[0] == 0
    assert lock.owner() is None


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--no-wait"], ": it is held by"), (["--timeout", "0.2"], " within 0.2 s; held by")],
)
def test_a_lock_that_is_not_had_in_time(
    redis_server: RedisServer, backend: dprims.Backend, name: str, options: list[str], says: str
) -> None:
    with dprims.DistributedLock(name, backend, label="somebody"):
        run = call("lock", "run", *options, redis_server.url, name, "--", "echo", "ran")
    assert (run.returncode, run.stdout) == (1, "")
    assert re.fullmatch(
        f"dprims: lock '{name}' was not acquired{says} somebody pid {os.getpid()}.*\n", run.stderr
    )


def test_a_signal_while_waiting_leaves_the_queue(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    lock = dprims.DistributedLock(name, backend)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with lock, Started(*DPRIMS, "lock", "run", redis_server.url, name, "--", "echo", "ran") as run:
            until(lock.waiters)
            run.process.send_signal(number)
            assert run.end()[:2] == (status, "")
            assert lock.waiters() == []


@pytest.mark.parametrize("server", ["redis_server", "etcd_server"])
def test_two_signals_at_once_end_the_wait_and_leave_the_queue(
    request: pytest.FixtureRequest, server: str, name: str
) -> None:
    """The second one strikes while the first one's withdrawal is on its way."""
    url = request.getfixturevalue(server).url
    with dprims.connect(url) as backend:
        lock = dprims.DistributedLock(name, backend)
        for gap in (0.0, 0.0005, 0.002):
            with lock, Started(*DPRIMS, "lock", "run", url, name, "--", "echo", "ran") as run:
                until(lock.waiters)
                run.process.send_signal(signal.SIGTERM)
                time.sleep(gap)
                run.process.send_signal(signal.SIGTERM)
                status, out, _ = run.end()
                # the second may also strike when all is over, and then ends what is left of the process
                assert status in (143, -signal.SIGTERM)
                assert out == ""
                assert lock.waiters() == []


def test_two_signals_at_once_end_the_command_and_free_the_lock(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    lock = dprims.DistributedLock(name, backend)
    for gap in (0.0, 0.0005, 0.001, 0.002, 0.003):
        with holding(redis_server.url, name, "exec sleep 1000", "--ttl", "60") as run:
            run.process.send_signal(signal.SIGTERM)
            time.sleep(gap)
            run.process.send_signal(signal.SIGTERM)
            assert run.end()[0] in (143, -signal.SIGTERM)
            assert lock.owner() is None


def test_a_signal_ends_the_wait_though_the_server_gives_no_answer(
    private_redis: RedisServer, name: str
) -> None:
    with dprims.connect(private_redis.url) as backend:
        lock = dprims.DistributedLock(name, backend, ttl=60.0)
        with lock, Started(*DPRIMS, "lock", "run", private_redis.url, name, "--", "echo", "ran") as run:
            until(lock.waiters)
            private_redis.freeze()
            run.process.send_signal(signal.SIGTERM)
            try:
                assert run.end()[:2] == (143, "")
            finally:
                private_redis.thaw()


def test_a_lost_lock_ends_the_command_and_what_it_started(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    script = "sleep 1000 & echo child $!; wait"
    with holding(redis_server.url, name, script, "--ttl", "0.5", "--json") as run:
        run.until_said(b"child")
        run.until_said(b"\n")
        child = int(run.said.split()[-1])
        owner = dprims.DistributedLock(name, backend).owner()
        assert backend.evict(f"dprims/{name}", owner.token)
        status, out, err = run.end()
    assert status == 75
    assert err == f"dprims lock run: lock '{name}' (token {owner.token}) was lost; the command was ended\n"
    assert json.loads(out.splitlines()[-1]) == {
        "name": name,
        "token": owner.token,
        "status": 75,
        "lost": True,
    }
    until(lambda: gone(child))


def test_a_command_that_ignores_sigterm_is_killed(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    script = "trap '' TERM; echo deaf; while :; do sleep 0.05; done"
    with holding(redis_server.url, name, script, "--ttl", "0.3", "--grace", "0.2") as run:
        run.until_said(b"deaf")
        assert backend.evict(f"dprims/{name}", dprims.DistributedLock(name, backend).owner().token)
        assert run.end()[0] == 75


def test_a_server_that_is_gone_for_a_ttl_ends_the_command(private_redis: RedisServer, name: str) -> None:
    with holding(private_redis.url, name, "sleep 1000", "--ttl", "0.5") as run:
        private_redis.kill()
        status, _, err = run.end()
    assert status == 75
    assert err.count("\n") == 1


def test_a_killed_dprims_takes_its_command_along(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    with holding(redis_server.url, name, "echo me $$; sleep 1000", "--ttl", "0.5") as run:
        run.until_said(b"me")
        run.until_said(b"\n")
        child = int(run.said.split()[-1])
        run.process.kill()
        until(lambda: gone(child))
    dprims.DistributedLock(name, backend).acquire(LIMIT).release()


def test_on_a_terminal_ctrl_c_reaches_the_command_once(redis_server: RedisServer, name: str) -> None:
    script = "trap 'echo got' INT; echo go; read line; read line; echo done; exit 3"
    terminal = [sys.executable, "-c", SPAWN]
    with Started(
        *terminal, *DPRIMS, "lock", "run", redis_server.url, name, "--", "/bin/sh", "-c", script
    ) as run:
        run.until_said(b"go")
        run.process.stdin.write(b"\x03")
        run.until_said(b"got")
        run.process.stdin.write(b"\n\n")
        run.until_said(b"done")
        status, out, _ = run.end()
    assert status == 3
    assert out.count("got") == 1


JOB = """\
echo pid $$ begun
read line; echo "got $line"
read line; echo "got $line"
exit 3
"""


@pytest.mark.skipif(not BASH.exists(), reason="needs a shell with job control")
def test_a_background_job_that_reads_has_the_terminal_when_it_is_brought_to_the_front(
    redis_server: RedisServer, backend: dprims.Backend, name: str, tmp_path: Path
) -> None:
    """In the background it is stopped; fg continues it, Ctrl-Z stops it, and fg continues it again."""
    script = tmp_path / "job.sh"
    script.write_text(JOB)
    command = shlex.join([*DPRIMS, "lock", "run", "--ttl", "60", redis_server.url, name, "sh", str(script)])
    with shell_on_terminal() as shell:
        shell.types(f"{command} &\n")
        shell.until_said(b" begun")
        pid = int(re.findall(rb"pid (\d+) begun", shell.said)[0])
        until(lambda: process_state(pid) == "T")
        shell.types("fg\n")
        until(lambda: process_state(pid) != "T")
        shell.types("first\n")
        shell.until_said(b"got first")
        shell.types("\x1a")
        shell.until_said(b"Stopped")
        assert process_state(pid) == "T"
        shell.types("fg\n")
        until(lambda: process_state(pid) != "T")
        shell.types("second\n")
        shell.until_said(b"got second")
        shell.types("echo st''atus $?\n")
        shell.until_said(b"status 3")
        assert dprims.DistributedLock(name, backend).owner() is None
        shell.types("exit\n")
        assert shell.end()[0] == 0


@pytest.mark.skipif(not BASH.exists(), reason="needs a shell with job control")
def test_a_command_stops_and_goes_on_with_dprims(redis_server: RedisServer, name: str) -> None:
    """Ctrl-Z of what was started in the background and wants no terminal."""
    script = "echo pid $$ be''gun; while :; do sleep 0.05; done"
    command = shlex.join([*DPRIMS, "lock", "run", "--ttl", "60", redis_server.url, name, "sh", "-c", script])
    with shell_on_terminal() as shell:
        shell.types(f"{command} &\n")
        shell.until_said(b" begun")
        pid = int(re.findall(rb"pid (\d+) begun", shell.said)[0])
        parent, *_, foreground = stat(pid)[1:6]
        assert parent != foreground
        shell.types("fg\n")
        until(lambda: stat(pid)[5] == parent)
        shell.types("\x1a")
        shell.until_said(b"Stopped")
        until(lambda: process_state(pid) == "T")
        shell.types("bg\n")
        until(lambda: process_state(pid) != "T")
        shell.types("kill %1; wait %1; echo st''atus $?\n")
        shell.until_said(b"status 143")
        assert gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_command_is_ended_by_a_signal(
    redis_server: RedisServer, name: str, number: signal.Signals
) -> None:
    with holding(redis_server.url, name, "echo me $$; kill -STOP $$; sleep 1000") as run:
        run.until_said(b"me")
        run.until_said(b"\n")
        child = int(run.said.split()[-1])
        until(lambda: process_state(child) == "T")
        run.process.send_signal(number)
        assert run.end()[0] == 128 + number


def test_a_process_that_is_continued_goes_on_waiting_for_the_lock(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    lock = dprims.DistributedLock(name, backend)
    with Started(*DPRIMS, "lock", "run", redis_server.url, name, "--", "echo", "ran") as run:
        with lock:
            until(lock.waiters)
            for number, state in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
                run.process.send_signal(number)
                until(lambda state=state: process_state(run.process.pid) == state)
        assert run.end() == (0, "ran\n", "")


def test_a_command_that_cannot_be_started(redis_server: RedisServer, tmp_path: Path, name: str) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    for command, status in (("no-such-program", 127), (str(plain), 126)):
        run = call("lock", "run", redis_server.url, name, "--", command)
        assert run.returncode == status
        assert run.stderr.startswith(f"dprims lock run: {command}: ")
        assert run.stderr.count("\n") == 1


# -- ls, show, break ------------------------------------------------------------------------------


def test_ls_show_and_break(redis_server: RedisServer, backend: dprims.Backend, name: str) -> None:
    url = redis_server.url
    lock = dprims.DistributedLock(name, backend, label="holder")
    other = dprims.DistributedLock(f"{name} b", backend)
    grant = lock.acquire()
    with other, Started(*DPRIMS, "lock", "run", "--label", "next", url, name, "--", "true") as run:
        until(lock.waiters)
        head, first, second = call("lock", "ls", url, name).stdout.splitlines()
        assert head.split() == ["NAME", "TOKEN", "HOLDER", "ASKED"]
        assert re.fullmatch(rf"{name}\s+{grant.token}\s+holder pid {os.getpid()} on .* s ago", first)
        assert second.startswith(f"{name} b")
        listed = json.loads(call("lock", "ls", url, "--json", name).stdout)
        assert [(one["name"], one["pid"]) for one in listed] == [
            (name, os.getpid()),
            (f"{name} b", os.getpid()),
        ]
        assert listed[0]["token"] == grant.token

        held, waits = call("lock", "show", url, name).stdout.splitlines()
        assert held.startswith(f"{name} is held by holder pid {os.getpid()}")
        assert waits.startswith(f"  1. next pid {run.process.pid}")
        shown = json.loads(call("lock", "show", url, name, "--json").stdout)
        assert (shown["name"], shown["owner"]["token"]) == (name, grant.token)
        assert [(waiter["pid"], waiter["token"]) for waiter in shown["waiters"]] == [(run.process.pid, None)]

        refused = call("lock", "break", url, name, "--token", "1")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr == f"dprims lock break: {name} is held with token {grant.token}, not 1\n"
        broken = json.loads(call("lock", "break", url, name, "--json").stdout)
        assert (broken["broken"], broken["owner"]["token"]) == (True, grant.token)
        assert run.end()[0] == 0
        with pytest.raises(dprims.LockLost):
            grant.verify()
        with pytest.raises(dprims.LockLost):
            grant.release()


def test_looking_at_nothing(redis_server: RedisServer, name: str) -> None:
    url = redis_server.url
    assert call("lock", "show", url, name).stdout == f"{name} is free\n"
    shown = call("lock", "show", url, name, "--json")
    assert json.loads(shown.stdout) == {"name": name, "owner": None, "waiters": []}
    listed = call("lock", "ls", url, name)
    nothing = f"dprims lock ls: no lock that starts with '{name}' is held in namespace dprims\n"
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "", nothing)
    assert call("lock", "ls", url, "--namespace", name).stderr.startswith("dprims lock ls: no lock is held")
    assert json.loads(call("lock", "ls", url, name, "--json").stdout) == []
    broken = call("lock", "break", url, name)
    assert (broken.returncode, broken.stderr) == (1, f"dprims lock break: {name} is not held\n")


def test_a_label_cannot_break_the_table(
    redis_server: RedisServer, backend: dprims.Backend, name: str
) -> None:
    label = "first\nsecond\x1b[31m\u2028red é"
    lock = dprims.DistributedLock(name, backend, label=label)
    roster = dprims.Roster(name, backend)
    with lock as grant:
        roster.join("a", {"words": "x\ny"})
        url, shown = redis_server.url, r"first\nsecond\x1b[31m\u2028red é pid"
        _, row = call("lock", "ls", url, name).stdout.splitlines()
        assert shown in row
        assert shown in (held := call("lock", "show", url, name).stdout)
        assert held.count("\n") == 1
        assert len(call("roster", url, name).stdout.splitlines()) == 2
        assert json.loads(call("lock", "ls", url, name, "--json").stdout)[0]["label"] == label
        broken = call("lock", "break", url, name).stdout
        assert shown in broken
        assert broken.count("\n") == 1
        with pytest.raises(dprims.LockLost):
            grant.release()
    roster.leave()


def test_namespaces_are_apart(redis_server: RedisServer, backend: dprims.Backend, name: str) -> None:
    with dprims.DistributedLock(name, backend, namespace="theirs"):
        assert json.loads(call("lock", "show", redis_server.url, name, "--json").stdout)["owner"] is None
        theirs = call("lock", "ls", redis_server.url, name, "--json", "--namespace", "theirs")
        assert [one["name"] for one in json.loads(theirs.stdout)] == [name]


def test_roster(redis_server: RedisServer, backend: dprims.Backend, name: str) -> None:
    url = redis_server.url
    assert json.loads(call("roster", url, name, "--json").stdout) == []
    empty = call("roster", url, name)
    assert (empty.returncode, empty.stdout) == (0, "")
    assert empty.stderr == f"dprims roster: nobody is in roster {name} of namespace dprims\n"
    roster = dprims.Roster(name, backend)
    grant = roster.join("shard 0", {"gpus": 2})
    roster.join("shard 1")
    head, first, second = call("roster", url, name).stdout.splitlines()
    assert head.split() == ["MEMBER", "INCARNATION", "PROCESS", "PAYLOAD"]
    assert re.fullmatch(rf'shard 0\s+{grant.token}\s+pid {os.getpid()} on .*\s+{{"gpus": 2}}', first)
    assert second.startswith("shard 1")
    one = json.loads(call("roster", url, name, "--json").stdout)[0]
    assert (one["name"], one["incarnation"], one["payload"]) == ("shard 0", grant.token, {"gpus": 2})
    assert one["owner"]["pid"] == os.getpid()
    roster.leave()


# -- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lock"], "Missing command"),
        (["lock", "walk"], "No such command 'walk'"),
        (["lock", "run", "URL", "n"], "Missing argument 'COMMAND"),
        (["lock", "run"], "Missing argument 'NAME'"),
        (["lock", "run", "-l", "URL", "n", "ls"], "No such option: -l"),
        (["lock", "run", "URL", "--ttl", "1", "n", "ls"], "NAME: got '--ttl'; options come before URL"),
        (["lock", "run", "URL", "n", "--ttl", "1", "ls"], "COMMAND: got '--ttl'; options come before URL"),
        (
            ["lock", "run", "--no-wait", "--timeout", "1", "URL", "n", "--", "ls"],
            "cannot be used with --timeout",
        ),
        (["lock", "run", "--timeout", "-1", "URL", "n", "--", "ls"], "timeout is -1.0"),
        (["lock", "run", "--ttl", "0", "URL", "n", "--", "ls"], "ttl is 0.0"),
        (["lock", "run", "--grace", "-1", "URL", "n", "--", "ls"], "--grace"),
        (["lock", "run", "URL", "", "--", "ls"], "lock name is ''"),
        (["lock", "run", "nowhere://x", "n", "--", "ls"], "scheme is 'nowhere'"),
        (["lock", "run", "n", "ls"], "Missing argument 'URL', and DPRIMS_BACKEND is not set."),
        (["lock", "ls"], "Missing argument 'URL', and DPRIMS_BACKEND is not set."),
        (["lock", "show", "nowhere", "n"], "expected scheme://"),
        (["lock", "run", "memory://x", "n", "--", "ls"], "'memory://x' is seen by one process alone"),
        (["lock", "run", "memory://u:secret@x?p=secret", "n", "ls"], "'memory://...' is seen by one process"),
        (["lock", "show", "URL"], "Missing argument"),
        (["lock", "show", "URL", "x" * 600], "expected 1 to 512 bytes"),
        (["lock", "ls", "URL", "a", "b"], "unexpected extra argument"),
        (["lock", "ls", "URL", "--namespace", ""], "namespace is ''"),
        (["lock", "break", "URL", "n", "--token", "x"], "--token"),
        (["roster", "URL"], "Missing argument"),
        (["roster", "URL", "a/b"], "expected no slash"),
    ],
)
def test_wrong_use_is_one_line_and_2(redis_server: RedisServer, arguments: list[str], says: str) -> None:
    run = call(*(redis_server.url if argument == "URL" else argument for argument in arguments))
    assert run.returncode == 2
    assert run.stdout == ""
    assert says in run.stderr
    assert "secret" not in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line_and_1() -> None:
    run = call("lock", "ls", "redis://127.0.0.1:1")
    assert (run.returncode, run.stdout) == (1, "")
    assert re.fullmatch(r"dprims: redis://127\.0\.0\.1:1.*refused.*\n", run.stderr)
