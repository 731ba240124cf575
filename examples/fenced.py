"""A resource that refuses a stale lock holder: what a fencing token is for.

    python examples/fenced.py                     # on a store that it serves itself
    python examples/fenced.py redis://host:6379   # or any other backend

The process "slow" takes the lock, writes, and is stopped for longer than its ttl, as by a long pause.
The lock passes on to "next", which writes too. Then "slow" runs again and writes, still believing: the
resource has seen a larger token and refuses. No lock alone can prevent that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection

import dprims

TTL = 1.0


def worker(name: str, url: str, resource: Connection) -> None:
    """Take the lock, then write whenever the other side asks to."""
    with dprims.connect(url) as backend:
        grant = dprims.DistributedLock("ledger", backend, ttl=TTL, timeout=60.0, label=name).acquire()
        while grant and (line := resource.recv()):
            resource.send((grant.token, f"{name}: {line}", grant.lost))


def main(url: str) -> int:
    """The resource: a list of lines that only the latest holder may append to."""
    with dprims.connect(url) as backend:
        fence = dprims.FencedResource("ledger")
        ledger: list[str] = []

        def write(line: str, pipe: Connection) -> bool:
            pipe.send(line)
            token, text, lost = pipe.recv()
            print(
                f"{text!r} with token {token}, which its holder thinks is {'lost' if lost else 'good'}: ",
                end="",
            )
            try:
                fence.check(token)
            except dprims.LockLost as refused:
                print(f"refused ({refused})")
                return False
            ledger.append(text)
            print("written")
            return True

        slow, slow_pipe = start("slow", backend.url)
        write("first", slow_pipe)
        os.kill(slow.pid or 0, signal.SIGSTOP)
        print(f"slow (pid {slow.pid}) stands still; its lock lapses after {TTL:g} s")
        following, next_pipe = start("next", backend.url)
        write("second", next_pipe)
        os.kill(slow.pid or 0, signal.SIGCONT)
        accepted = write("late", slow_pipe)
        for process, pipe in ((slow, slow_pipe), (following, next_pipe)):
            pipe.send("")
            process.join()
    print("the ledger:", ledger)
    return 1 if accepted or ledger != ["slow: first", "next: second"] else 0


def start(name: str, url: str) -> tuple[multiprocessing.Process, Connection]:
    """A worker and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(name, url, theirs))
    process.start()
    return process, ours


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", default="tcpstore://127.0.0.1:0?serve=1")
    try:
        sys.exit(main(parser.parse_args().url))
    except dprims.BackendMisconfigured as error:
        parser.error(str(error))
    except dprims.BackendUnavailable as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
