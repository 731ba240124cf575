"""``rediss://``: TLS in front of a Redis server, with certificates made for the occasion."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import dprims
from dprims.exceptions import BackendUnavailable
from dprims.testing.servers import RedisServer

LIMIT = 30.0


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    openssl = shutil.which("openssl") or pytest.skip("openssl makes the certificate")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(
                openssl,
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def serve(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    """Decrypt what comes in and hand it to the server on *port*, until the listener is closed."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def connection(client: socket.socket) -> None:
        with (
            client,
            suppress(OSError),
            context.wrap_socket(client, server_side=True) as secure,
            socket.create_connection(("127.0.0.1", port)) as server,
        ):
            back = threading.Thread(target=pump, args=(server, secure))
            back.start()
            pump(secure, server)
            back.join()

    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=connection, args=(client,), daemon=True).start()


@pytest.fixture
def secured(redis_server: RedisServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of the TLS end, and the certificate to trust."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, context, redis_server.port))
        thread.start()
        yield f"localhost:{listener.getsockname()[1]}", certificate
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT)


def test_lock_over_tls(secured: tuple[str, Path]) -> None:
    address, certificate = secured
    with dprims.connect(f"rediss://{address}?ssl_ca_certs={certificate}") as backend:
        lock = dprims.DistributedLock("tls", backend)
        grant = lock.acquire()
        tokens: list[int] = []
        waiter = threading.Thread(target=lambda: tokens.append(lock.acquire(LIMIT).token))
        waiter.start()
        deadline = time.monotonic() + LIMIT
        while not lock.waiters() and time.monotonic() < deadline:
            time.sleep(0.01)
        grant.release()
        waiter.join(LIMIT)
        assert tokens > [grant.token]


@pytest.mark.parametrize("scheme", ["rediss", "redis"])
def test_a_certificate_that_is_not_trusted_or_no_tls(secured: tuple[str, Path], scheme: str) -> None:
    with pytest.raises(BackendUnavailable, match=rf"{scheme}://localhost:\d+"):
        dprims.connect(f"{scheme}://{secured[0]}?timeout=2")
