"""What the pages of the documentation show is what happens: their code runs, their commands exist."""

from __future__ import annotations

import doctest
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dprims.cli import _app

from .helpers.pages import ROOT, Block, blocks, finished, pages, script, start

PAGES = pages()
RUN_ELSEWHERE = {
    "docs/moving.md": "tests/test_moving_docs.py",
    "docs/traces.md": "tests/test_trace_docs.py",
    "README.md": "tests/test_readme.py",
}
"""Pages whose code is run by a test of their own, which looks at more than that it ends well."""
NOT_RUN_AT_MOST = 10


def _scripts() -> list[Any]:
    """The pages with code to run; those that start fleets are slow."""
    found = []
    for name, page in PAGES.items():
        if name not in RUN_ELSEWHERE and (text := script(page)):
            marks = [pytest.mark.slow] if "dprims.engines" in text or "torch" in text else []
            found.append(pytest.param(name, marks=marks))
    return found


def _blocks(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{name}:{block.line}")
        for name, page in PAGES.items()
        for block in blocks(page, *languages)
    ]


@pytest.mark.parametrize("name", _scripts())
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    code = tmp_path / "page.py"
    code.write_text(script(PAGES[name]))
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    finished([start(str(code), environment=environment, cwd=tmp_path)])


@pytest.mark.parametrize(
    "name", [name for name, page in PAGES.items() if any(b.is_session for b in blocks(page, "python"))]
)
def test_a_session_on_a_page_is_what_happens(name: str) -> None:
    result = doctest.testfile(str(PAGES[name]), module_relative=False)
    assert result.attempted > sum(block.is_session for block in blocks(PAGES[name], "python"))
    assert result.failed == 0


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for page in PAGES.values() for block in blocks(page, "python") if block.not_run]
    assert len(left_out) <= NOT_RUN_AT_MOST
    assert all(len(block.not_run.split()) >= 4 for block in left_out)


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_what_is_run_elsewhere_is(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / test).read_text()


def test_the_pages_have_code_and_commands() -> None:
    assert len(_scripts()) >= 5
    assert len(_blocks("python")) >= 25
    assert sum(len(list(_commands(block.values[0]))) for block in _blocks("bash", "")) >= 10


def test_every_comment_about_a_block_stands_right_before_one() -> None:
    for name, page in PAGES.items():
        said = len(re.findall(r"^ *<!-- (?:before|not run):\s", page.read_text(), flags=re.M))
        assert said == sum(bool(b.before or b.not_run) for b in blocks(page)), name


@pytest.mark.parametrize("block", _blocks("bash", ""))
def test_the_commands_of_a_block_exist(block: Block) -> None:
    for command, *arguments in _commands(block):
        if command == "dprims":
            parse(arguments)
        elif command == "make":
            targets = [one for one in arguments if "=" not in one]
            assert set(targets) <= set(
                re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
            )
        elif command in ("python", "pytest"):
            files = [one for one in arguments if one.endswith(".py") and "/" in one]
            assert all((ROOT / file).is_file() for file in files), files


def parse(arguments: list[str]) -> None:
    """Have the command line read these arguments, and run nothing; what it does not know raises."""
    command, name = _app.command(arguments), "dprims"
    while hasattr(command, "commands"):
        context = command.make_context(name, list(arguments))
        words = [*context._protected_args, *context.args]  # click keeps the command's name in the first
        name, command, arguments = command.resolve_command(context, words)
    command.make_context(name, list(arguments))


@pytest.mark.parametrize("wrong", ["dprims nonsense", "dprims mesh -n 4 --nonsense", "dprims lock nonsense"])
def test_a_wrong_command_is_seen(wrong: str) -> None:
    with pytest.raises(Exception, match="nonsense"):
        parse(shlex.split(wrong)[1:])


def _commands(block: Block) -> list[list[str]]:
    """The commands of a block, as words; settings of the environment before them are left out."""
    commands = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words = (
            shlex.split(line, comments=True) if block.language == "bash" else line.partition("#")[0].split()
        )
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words and words[0] in ("dprims", "make", "python", "pytest"):
            commands.append(words)
    return commands


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_points_to_is_there(name: str) -> None:
    page = PAGES[name]
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            made = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}.get(target)
            assert ((ROOT / made) if made else page.parent / target).exists(), target
