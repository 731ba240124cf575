"""What the documentation site adds to the pages: links, docstrings, and nothing from another host."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import griffe
import pytest
from mkdocs.exceptions import PluginError

from .helpers.pages import ROOT

hooks = SimpleNamespace(**run_path(str(ROOT / "docs" / "site_hooks.py")))
docstrings = SimpleNamespace(**run_path(str(ROOT / "docs" / "site_docstrings.py")))


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("backends.md", "layouts.md#axes", "layouts.md#axes"),
        ("api/backends.md", "../backends.md", "../backends.md"),
        ("api/backends.md", "../../CONTRIBUTING.md#tests", "../contributing.md#tests"),
        ("architecture.md", "../tests/test_layers.py", "files/tests/test_layers.py.md"),
        ("api/backends.md", "../../README.md", "../index.md"),
        ("contributing.md", "docs/backends.md", "backends.md"),
        ("contributing.md", "examples/toy_backend.py", "files/examples/toy_backend.py.md"),
        ("contributing.md", "https://example.org/docs/x.md", "https://example.org/docs/x.md"),
        ("contributing.md", "#tests", "#tests"),
        ("refits.md", "images/leader.svg", "images/leader.svg"),
    ],
)
def test_a_link_of_the_repository_is_one_of_the_site(page: str, link: str, on_the_site: str) -> None:
    assert hooks.rewritten(f"see [it]({link}).", page) == f"see [it]({on_the_site})."


def test_code_is_left_as_it_is() -> None:
    text = (
        "[a](docs/start.md)\n\n```python\nx = f[0](docs)  # [a](docs/start.md)\n```\n\n[b](docs/start.md)\n"
    )
    expected = "[a](start.md)\n\n```python\nx = f[0](docs)  # [a](docs/start.md)\n```\n\n[b](start.md)\n"
    assert hooks.rewritten(text, "contributing.md") == expected


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        "<img alt='x' src=//example.org/x.png>",
        '<link rel="stylesheet" href="https://fonts.example.org/css">',
    ],
)
def test_what_comes_from_another_host_is_refused(tag: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<html>{tag}</html>")
    with pytest.raises(PluginError, match="another host"):
        hooks.on_post_build({"site_dir": tmp_path})


def test_links_to_other_hosts_are_fine(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://x.org">x</a><link href="a.css"><script src="a.js"></script>'
    )
    hooks.on_post_build({"site_dir": tmp_path})


def test_roles_become_links_and_double_colons_code() -> None:
    package = griffe.load("dprims", search_paths=[str(ROOT)])
    grant = package["lock.Grant"]
    text = docstrings.markdown(
        "Hand it to :class:`FencedResource`, or :meth:`~dprims.Roster.join`.\n\n::\n\n    x = 1", grant
    )
    assert (
        '<autoref optional identifier="dprims.lock.FencedResource"><code>FencedResource</code></autoref>'
        in text
    )
    assert "<code>join</code>" in text
    assert "::" not in text
    assert docstrings.markdown("So::\n\n    x = 1", grant).startswith("So:\n")
    assert docstrings.markdown(":class:`NoSuchThing`", grant).endswith("<code>NoSuchThing</code></autoref>")
