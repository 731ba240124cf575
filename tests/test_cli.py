"""The frame of the command line: how commands are found, and what wrong use looks like."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dprims
from dprims import cli
from dprims.cli import main

COMMAND = '''
"""One command."""

import typer

from dprims import LayoutError, LockLost


def probe(size: int = 1, fail: str = "") -> None:
    """Print the size, or fail as asked."""
    if fail == "layout":
        raise LayoutError("pp is 3;\\nexpected a divisor")
    if fail == "lock":
        raise LockLost("lock 'a' is lost")
    if fail == "exit":
        raise typer.Exit(7)
    if fail == "interrupt":
        raise KeyboardInterrupt
    print("size", size)
'''
GROUP = '''
"""A group of commands."""

import typer

many = typer.Typer(help="Several.")


@many.command()
def one() -> None:
    """The first."""
    print("one")


@many.command()
def two() -> None:
    """The second."""
'''


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands beside the package's own: a plain one, a group, one that cannot be imported."""
    sources = {"probe": COMMAND, "many": GROUP, "broken": "raise RuntimeError('imported')"}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    yield
    for name in sources:
        sys.modules.pop(f"dprims.cli.{name}", None)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["probe", "--size", "4"], 0, "size 4\n", ""),
        (["many", "one"], 0, "one\n", ""),
        (["probe", "--fail", "exit"], 7, "", ""),
        (["probe", "--fail", "interrupt"], 130, "", ""),
        (["probe", "--fail", "lock"], 1, "", "dprims: lock 'a' is lost\n"),
        (["probe", "--fail", "layout"], 2, "", "dprims: pp is 3; expected a divisor\n"),
        (["probe", "--sise", "4"], 2, "", "dprims probe: No such option: --sise"),
        (["probe", "--size", "x"], 2, "", "dprims probe: Invalid value for '--size'"),
        (["many"], 2, "", "dprims many: Missing command."),
        (["many", "three"], 2, "", "dprims many: No such command 'three'."),
    ],
)
def test_command(
    arguments: list[str], status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    said = capsys.readouterr()
    assert said.out == out
    assert said.err.startswith(err)
    assert said.err.count("\n") == (1 if err else 0)


@pytest.mark.usefixtures("commands")
def test_only_the_command_that_is_asked_for_is_imported() -> None:
    main(["many", "two"])
    assert "dprims.cli.many" in sys.modules
    assert "dprims.cli.probe" not in sys.modules
    with pytest.raises(RuntimeError, match="imported"):
        main(["broken"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["--what"], "No such option: --what"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"dprims: {message}")
    assert said.err.count("\n") == 1


def shell(line: str, unbuffered: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run *line*, in which $DPRIMS is the program."""
    settings = {**os.environ, "DPRIMS": f"{sys.executable} -m dprims", "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(["/bin/sh", "-c", line], env=settings, capture_output=True, timeout=60)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize(
    "command", ["mesh -n 64 --tp 8", "mesh -n 64 --json", "doctor", "doctor --json", "--help"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line_and_status_1(command: str, unbuffered: str) -> None:
    ran = shell(f"$DPRIMS {command} >/dev/full", unbuffered)
    assert ran.returncode == 1
    assert ran.stderr == b"dprims: cannot write its output: No space left on device\n"


def test_a_closed_stdout_or_stderr_is_no_error() -> None:
    assert (ran := shell("$DPRIMS mesh -n 64 --tp 8 >&-")).returncode == 0, ran.stderr
    ran = shell("$DPRIMS nonsense 2>&-")
    assert (ran.returncode, ran.stdout) == (2, b"")


def test_a_reader_that_has_gone_is_no_line() -> None:
    ran = shell("{ $DPRIMS --version; echo $? >&2; } | true")
    assert ran.stderr in (b"0\n", b"1\n")


@pytest.mark.parametrize("command", [["-m", "dprims"], [str(Path(sys.executable).with_name("dprims"))]])
def test_version_from_a_shell(command: list[str]) -> None:
    if command[0] == "-m":
        command = [sys.executable, *command]
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"dprims {dprims.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].split("\n")
    files = {path.stem for path in Path(cli.__file__).parent.glob("[a-z]*.py")}
    assert {line.split()[0] for line in listed if line.strip()} == files
    assert not [line for line in listed if line.endswith("...")], "a summary is cut"
