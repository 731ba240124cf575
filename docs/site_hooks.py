"""What the documentation site adds to the pages in docs/.

CONTRIBUTING.md and CHANGELOG.md become pages. A link from a page to a file of the repository that is no page
(an example, a test) leads to a page that shows the file. A site that loads anything from another host is
refused.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages, and the files at the root that they are."""

_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.M | re.S)
_REMOTE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>|<link\b[^>]*>", re.I
)
_LANGUAGE = {".py": "python", ".toml": "toml", ".yml": "yaml", ".md": "markdown"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that come from outside docs/."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    shown = {
        target
        for file in list(files.documentation_pages())
        for target in _links(file.content_string, _home(file.src_uri))
        if not _is_page(target) and (ROOT / target).is_file() and not target.startswith("docs/")
    }
    for target in sorted(shown):
        language = _LANGUAGE.get(PurePosixPath(target).suffix, "")
        text = f"# {target}\n\n````{language}\n{(ROOT / target).read_text()}\n````\n"
        files.append(
            File.generated(config, _shown_at(target), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    return rewritten(markdown, page.file.src_uri)


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse what a reader without a network would miss."""
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        for tag in _REMOTE.findall(path.read_text()):
            is_link = tag.startswith("<link")
            if not is_link or (re.search(r"href=[\"']?(?:https?:)?//", tag) and "canonical" not in tag):
                raise PluginError(f"{path.name} loads something from another host: {tag}")


def rewritten(markdown: str, page: str) -> str:
    """The text of *page* with the targets of its links as the site has them."""
    home = _home(page)

    def link(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        path = normpath(f"{home}/{target}")
        if path.startswith("docs/") and home == "docs":
            return found[0]
        return before + relpath(_site_path(path), PurePosixPath(page).parent.as_posix() or ".") + after

    parts, end = [], 0
    for fence in _FENCED.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])


def _links(markdown: str, home: str) -> list[str]:
    """The files of the repository that a text points to, by their paths from its root."""
    return [normpath(f"{home}/{found[1]}") for found in _LINK.findall(_FENCED.sub("", markdown))]


def _home(page: str) -> str:
    """The folder, seen from the root, from which the links of a page count."""
    if page in FROM_ROOT:
        return "."
    return normpath(f"docs/{PurePosixPath(page).parent}")


def _is_page(path: str) -> bool:
    return path in FROM_ROOT.values() or path == "README.md"


def _site_path(path: str) -> str:
    """Where the site has a file of the repository, from the site's root."""
    pages = {source: page for page, source in FROM_ROOT.items()} | {"README.md": "index.md"}
    if path in pages:
        return pages[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _shown_at(path)


def _shown_at(path: str) -> str:
    return f"files/{path}.md"
