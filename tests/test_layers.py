"""Who may import whom, read from the source of every module; what is imported in a function counts too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import pytest

import dprims

ROOT = Path(dprims.__file__).parent

PURE = ("layout", "_layout_*", "membership", "health")
PROTOCOL = tuple(
    f"synchronizer.{name}"
    for name in ("protocol", "plan", "_leader*", "_member", "_messages", "_keys", "_record")
)
LOCKS = ("lock", "roster", "session", "record")
MESH = ("mesh", "_mesh_*")
SYNCHRONIZER = ("synchronizer", "synchronizer.*")
BELOW = (*PURE, *LOCKS, *MESH, "backend", "metrics", "tied", "torchstore")
# What judges facts; what gathers them stands beside it.
DOCTOR = tuple(f"doctor.{name}" for name in ("checks", "findings", "facts", "rule", "_check_*", "_rules_*"))
CLIENTS = ("torch", "redis", "valkey", "etcd3", "grpc", "google")
# A value or a state machine is told the time, and by whom; it does not look.
OUTSIDE = ("asyncio", "datetime", "multiprocessing", "os", "random")
OUTSIDE += ("select", "signal", "socket", "subprocess", "threading", "time")


@dataclass(frozen=True)
class Layer:
    """What the modules whose names match may import, besides the standard library and ``exceptions``."""

    modules: tuple[str, ...]
    may: tuple[str, ...] = ()
    """Modules of dprims."""
    lazily: tuple[str, ...] = ()
    """Modules of dprims, inside functions and for type checkers only."""
    as_types: tuple[str, ...] = ()
    """Modules of dprims, for type checkers only."""
    packages: tuple[str, ...] = ()
    """Packages that pip installs; for type checkers every layer may."""
    packages_lazily: tuple[str, ...] = ()
    """The same, inside functions only."""
    never: tuple[str, ...] = ()
    """Modules of the standard library that are out of bounds."""


# The first that matches holds. A new module that is in none of them may import `exceptions` alone.
LAYERS = (
    Layer(("exceptions",)),
    Layer(("",), lazily=("backend", "layout", "lock", "membership", "mesh", "roster")),
    Layer(("__main__",), may=("cli",)),
    Layer(("backend",), lazily=("session",)),
    Layer(("torchstore",), packages_lazily=("torch",)),
    Layer(("backends._*",), may=("backend", "backends.*", "torchstore"), packages=CLIENTS),
    Layer(("backends", "backends.*"), may=("backend", "backends.*", "torchstore"), packages_lazily=CLIENTS),
    Layer(LOCKS, may=("backend", "metrics", *LOCKS)),
    Layer(("layout",), may=PURE, lazily=("mesh",), as_types=("tied",), never=OUTSIDE),
    Layer(("tied",), may=PURE, packages_lazily=("torch",)),
    Layer(PURE, may=PURE, never=OUTSIDE),
    Layer(MESH, may=(*PURE, *MESH), packages=("torch",)),
    Layer(PROTOCOL, may=(*PURE, *PROTOCOL), never=OUTSIDE),
    Layer(("synchronizer.kernels",), packages=("triton",)),
    Layer(
        SYNCHRONIZER,
        may=(*BELOW, *SYNCHRONIZER),
        as_types=("testing.faults",),
        packages=("torch",),
        packages_lazily=("safetensors",),
    ),
    Layer(
        ("engines.ray", "engines._ray_*"),
        may=(*BELOW, *SYNCHRONIZER, "engines.*"),
        packages=("torch",),
        packages_lazily=("ray",),
    ),
    Layer(
        ("engines", "engines.*"),
        may=(*BELOW, *SYNCHRONIZER, "engines.*"),
        lazily=("testing.faults",),
        packages=("torch",),
    ),
    Layer(("status", "_status_*"), may=(*BELOW, *PROTOCOL, "_status_*")),
    Layer(("metrics",), packages_lazily=("prometheus_client",)),
    Layer(DOCTOR, may=(*DOCTOR, "synchronizer.environment"), never=OUTSIDE),
    Layer(("doctor.gather",), may=("doctor.*", "synchronizer.rendezvous")),
    Layer(
        ("doctor", "doctor.*"),
        may=("backend", "doctor", "doctor.*", "synchronizer.environment"),
        lazily=("lock", "backends.*"),
        packages_lazily=("google", "redis", "rich", "torch"),
    ),
    Layer(
        ("testing", "testing.*"),
        may=(*BELOW, *SYNCHRONIZER, "engines.*", "testing.*"),
        packages=("torch", "pytest", "hypothesis"),
    ),
    Layer(
        ("cli", "cli.*", "demo"),
        may=("*",),
        packages=("torch", "typer", "rich", "safetensors"),
        packages_lazily=("matplotlib", "ray"),
    ),
)

# Names that one place alone may know: torch's private mesh calls, and the transports.
KNOWN_ONLY_IN = {
    "_flatten": MESH,
    "_unflatten": MESH,
    "_mesh_resources": MESH,
    "ProcessGroupGloo": SYNCHRONIZER,
    "ProcessGroupNCCL": SYNCHRONIZER,
}

# These run in processes that they started for the purpose; nobody else touches the environment, but for what
# has torch make a weight group otherwise than the training's, and puts things back.
SETS_ENVIRONMENT = ("engines.local", "testing.*", "cli.*", "synchronizer.environment")

When = Literal["on import", "in a function", "for type checkers"]


def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``dprims``; the package itself is the empty name."""
    found = {}
    for folder in (ROOT, ROOT / "backends"):  # a glob does not follow the link
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def test_the_backends_are_among_the_modules() -> None:
    assert {"", "backend", "backends", "backends.memory", "exceptions", "lock"} <= MODULES.keys()


@pytest.mark.parametrize("module", sorted(MODULES), ids=lambda name: name or "dprims")
def test_module_keeps_to_its_layer(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("lock", "from .backends.redis import RedisBackend", "dprims.backends.redis on import"),
        ("lock", "def f():\n from dprims.backends import memory", "dprims.backends.memory in a function"),
        ("roster", "import dprims.backends.tcpstore", "dprims.backends.tcpstore on import"),
        (
            "session",
            "from importlib import import_module\nimport_module('dprims.backends.etcd')",
            "backends.etcd",
        ),
        ("lock", "def f():\n import torch", "torch in a function"),
        ("backend", "from .session import Session", "dprims.session on import"),
        ("backend", "import redis", "redis on import"),
        ("backends.redis", "import redis", "redis on import"),
        ("backends.redis", "from dprims.lock import Grant", "dprims.lock on import"),
        ("backends.redis", "import ray", "ray on import"),
        ("layout", "from .mesh import build", "dprims.mesh on import"),
        ("layout", "def f():\n import torch", "torch in a function"),
        ("membership", "import time", "time on import"),
        ("health", "def f():\n from datetime import timedelta", "datetime in a function"),
        ("synchronizer.protocol", "from .group import WeightGroup", "dprims.synchronizer.group on import"),
        ("synchronizer.protocol", "from . import group", "dprims.synchronizer.group on import"),
        ("synchronizer.plan", "import torch", "torch on import"),
        ("synchronizer.collective", "from dprims.cli import main", "dprims.cli on import"),
        (
            "synchronizer.collective",
            "from dprims import DistributedLock, backends",
            "dprims.backends on import",
        ),
        ("engines.local", "def f():\n need('ray', 'ray')", "ray in a function"),
        ("engines.ray", "import ray", "ray on import"),
        ("mesh", "from dprims import Roster", "dprims.roster on import"),
        ("a_new_module", "from .lock import Grant", "dprims.lock on import"),
        ("", "from .lock import Grant", "dprims.lock on import"),
        ("cli.bench", "import pandas", "pandas on import"),
        ("synchronizer.group", "mesh._flatten('x')", "_flatten"),
        ("engines.local", "from torch.distributed import ProcessGroupNCCL", "ProcessGroupNCCL"),
        ("synchronizer.group", "import os\nos.environ['X'] = '1'", "environment"),
        ("mesh", "from os import environ\nenviron.setdefault('X', '1')", "environment"),
    ],
)
def test_a_breach_is_seen(module: str, source: str, told: str) -> None:
    (breach,) = violations(module, source)
    assert told in breach


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lock", "import time\nfrom .backend import resolve\nfrom .exceptions import LockLost"),
        ("layout", "def build(self):\n from .mesh import build"),
        ("layout", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from .mesh import Meshes"),
        ("synchronizer.interfaces", "import typing\nif typing.TYPE_CHECKING:\n import numpy"),
        ("backends.tcpstore", "def f():\n from torch.distributed import TCPStore"),
        ("engines.ray", "class A:\n def f(self):\n  import ray"),
        ("cli.mesh", "from .. import __version__, layout\nimport typer"),
        ("mesh", "import os\nos.environ.get('RANK')\nmesh._flatten('x')"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def violations(module: str, source: str) -> list[str]:
    """What *module*, with this source, may not do, in words."""
    layer = next((layer for layer in LAYERS if _matches(module, layer.modules)), Layer((module,)))
    name = f"dprims.{module}".rstrip(".")
    tree = ast.parse(source)
    told = [
        f"{name} may not import {target} {when} (line {line}); see LAYERS"
        for target, when, line in _imports(module, tree)
        if not _allowed(layer, target, when)
    ]
    for node in ast.walk(tree):
        for word in _words(node):
            if word in KNOWN_ONLY_IN and not _matches(module, KNOWN_ONLY_IN[word]):
                told.append(f"{name} uses {word} (line {node.lineno}); {KNOWN_ONLY_IN[word]} may")
        if _sets_environment(node) and not _matches(module, SETS_ENVIRONMENT):
            told.append(f"{name} changes the environment (line {node.lineno})")
    return told


def _allowed(layer: Layer, target: str, when: When) -> bool:
    top, _, inner = target.partition(".")
    if top == "dprims":
        may = layer.may
        if when != "on import":
            may += layer.lazily
        if when == "for type checkers":
            may += layer.as_types
        return inner in ("", "exceptions") or _matches(inner, may)
    if top in sys.stdlib_module_names:
        return top not in layer.never or when == "for type checkers"
    if when == "for type checkers":
        return True
    return top in layer.packages or (when == "in a function" and top in layer.packages_lazily)


def _matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def _imports(module: str, tree: ast.AST, when: When = "on import") -> Iterator[tuple[str, When, int]]:
    """Each module that is imported below *tree*: its full name, when, and the line."""
    for node in ast.iter_child_nodes(tree):
        inside: When = when
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and when == "on import":
            inside = "in a function"
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from _imports(module, ast.Module([statement], []), "for type checkers")
            node = ast.Module(node.orelse, [])
        elif isinstance(node, ast.Import):
            yield from ((alias.name, when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node.module or "", node.level)
            yield from ((_home(source, alias.name), when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and (target := _named_by_string(node)):
            yield target, when, node.lineno
        yield from _imports(module, node, inside)


def _absolute(module: str, name: str, level: int) -> str:
    """The full name of what ``from ..name import`` means in *module*."""
    if not level:
        return name
    parts = f"dprims.{module}".rstrip(".").split(".")
    is_package = module in MODULES and MODULES[module].name == "__init__.py"
    package = parts[: len(parts) - level + is_package]
    return ".".join([*package, *filter(None, [name])])


def _home(source: str, name: str) -> str:
    """The module that ``from source import name`` loads: a submodule, or where a lazy name comes from."""
    if source.partition(".")[0] != "dprims":
        return source
    inner = f"{source}.{name}".removeprefix("dprims.")
    if inner in MODULES or inner in _KNOWN:
        return f"dprims.{inner}"
    return f"dprims.{dprims._MODULE_OF[name]}" if source == "dprims" and name in dprims._MODULE_OF else source


# Modules that a layer names are modules, also before they are written.
_KNOWN = {module for layer in LAYERS for module in layer.modules if "*" not in module}


def _named_by_string(call: ast.Call) -> str | None:
    called = ast.unparse(call.func).rpartition(".")[2]
    if called not in ("import_module", "need", "__import__") or not call.args:
        return None
    first = call.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _words(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    return []


def _sets_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return ast.unparse(node.value) in ("os.environ", "environ")
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).removeprefix("os.")
        return called in (
            "putenv",
            "unsetenv",
            *(f"environ.{verb}" for verb in ("update", "setdefault", "pop", "clear")),
        )
    return False
