"""Every protobuf that is in use, times both packages that provide ``etcd3``, alone and beside ``aetcd``.

::

    python tests/venvs/etcd_matrix.py

Each package is installed into a folder of its own, each combination of folders is a Python process that
sees those folders and the checkout, and takes a contended lock on a real server. Exits with 1 when one
of them fails. About a minute, most of it pip's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 60

PROTOBUFS = {
    "3.20": "protobuf==3.20.3",
    "4.21": "protobuf==4.21.12",
    "4.22": "protobuf==4.22.5",
    "4.25": "protobuf==4.25.8",
    "5.29": "protobuf==5.29.5",
    "6.33": "protobuf==6.33.0",
    "newest": "protobuf",
}
CLIENTS = {"etcd3": "etcd3==0.12.0", "etcd3-fc": "etcd3-fc==0.12.0"}
NEEDED = {"needed": ("grpcio", "six", "tenacity")}
ASYNC = {"aetcd": "aetcd"}

COMBINATIONS = [
    *product(("5.29", "6.33", "newest"), CLIENTS, ("alone", "aetcd first", "aetcd last")),
    *product(("3.20", "4.22", "4.25"), CLIENTS, ("alone",)),  # too old for aetcd
    ("4.21", "etcd3", "refused"),  # neither way works; the error has to say so
    ("4.21", "etcd3-fc", "alone"),
]


def main() -> int:
    """Install, run every combination, and say what became of each."""
    sys.path.insert(0, str(CHECKOUT))
    from dprims.testing.servers import EtcdServer

    with tempfile.TemporaryDirectory() as folder, EtcdServer() as server, ThreadPoolExecutor(4) as pool:
        layers = Path(folder)
        packages = {**PROTOBUFS, **CLIENTS, **NEEDED, **ASYNC}
        list(pool.map(lambda item: install(layers / item[0], item[1]), packages.items()))
        results = list(pool.map(lambda parts: run(layers, server.port, *parts), COMBINATIONS))
    for parts, output in zip(COMBINATIONS, results, strict=True):
        print(" ".join(f"{part:12}" for part in parts), "ok" if output is None else f"FAILED\n{output}")
    return int(any(output is not None for output in results))


def install(layer: Path, packages: str | tuple[str, ...]) -> None:
    """Put *packages*, without what they need, into a folder."""
    names = [packages] if isinstance(packages, str) else list(packages)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-warn-conflicts"]
    needs = [] if layer.name == "needed" else ["--no-deps"]
    subprocess.run([*pip, *needs, "--target", str(layer), *names], check=True, timeout=5 * LIMIT_S)


def run(layers: Path, port: int, protobuf: str, client: str, beside: str) -> str | None:
    """One combination in a process of its own; None when it works, else what it said."""
    folders = [layers / protobuf, layers / client, layers / "needed", layers / "aetcd", CHECKOUT]
    command = [sys.executable, "-I", "-S", __file__, "--port", str(port), "--beside", beside]
    command += [f"--layer={folder}" for folder in folders]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PROTOCOL_BUFFERS")
    }
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, env=environment
    )
    return None if done.returncode == 0 and not done.stdout.strip() else done.stdout


def inside(port: int, beside: str) -> None:
    """What each combination has to be able to do."""
    import asyncio
    import threading

    if beside == "aetcd first":
        import aetcd
    import dprims

    if beside == "refused":
        refusal = ""
        try:
            dprims.connect(f"etcd://127.0.0.1:{port}")
        except dprims.exceptions.BackendMisconfigured as error:
            refusal = str(error)
        assert "protobuf 4.21" in refusal, refusal
        return

    name, key = f"matrix {os.getpid()}", f"matrix-{os.getpid()}"
    with dprims.connect(f"etcd://127.0.0.1:{port}") as backend:
        tokens = []

        def take() -> None:
            for _ in range(5):
                with dprims.DistributedLock(name, backend) as grant:
                    tokens.append(grant.token)
                    time.sleep(0.001)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(tokens) == 20, tokens
        assert tokens == sorted(set(tokens)), tokens
        assert backend.write_once(key, b"value") == b"value"
        assert backend.wait(key, 1) == b"value"

    import etcd3  # the package itself works too, once dprims has loaded it

    with etcd3.client(port=port) as client:
        client.put(key, "from etcd3")
        assert client.get(key)[0] == b"from etcd3"
        lock = dprims.DistributedLock(name, client)
        with lock as grant:
            assert grant.token > tokens[-1]
        lock.backend.close()
        client.delete(key)

    if beside == "aetcd last":
        import aetcd
    if beside.startswith("aetcd"):

        async def use() -> None:
            async with aetcd.Client(port=port) as client:
                await client.put(key.encode(), b"from aetcd")
                assert (await client.get(key.encode())).value == b"from aetcd"
                await client.delete(key.encode())

        asyncio.run(use())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--beside", help=argparse.SUPPRESS)
    parser.add_argument("--layer", action="append", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.beside is None:
        sys.exit(main())
    sys.path[:0] = arguments.layer
    inside(arguments.port, arguments.beside)
