"""What ``import dprims`` offers, and what it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dprims
from dprims import exceptions

# What users of the package and checks outside this repository call it by.
PROMISED = {
    "DistributedLock",
    "FencedResource",
    "Meshes",
    "ParallelLayout",
    "RefitMembership",
    "Roster",
    "connect",
    "should_rebuild",
}
SYNCHRONIZER = {
    "Cluster",
    "CollectiveWeightSynchronizer",
    "Generation",
    "Policy",
    "RefitReport",
    "WeightReceiver",
    "WeightSender",
    "WeightSink",
    "WeightSource",
    "WeightSynchronizer",
}
NAMES = [name for name in dprims.__all__ if name != "__version__"]


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert sorted(set(NAMES)) == NAMES


def test_all_is_what_type_checkers_see() -> None:
    tree = ast.parse(Path(dprims.__file__).read_text())
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name
            seen[alias.name] = node.module
    assert seen == dprims._MODULE_OF


def test_all_has_every_promised_name_and_every_error() -> None:
    errors = {name for name, value in vars(exceptions).items() if inspect.isclass(value)}
    assert PROMISED | errors <= set(NAMES)
    assert all(issubclass(getattr(exceptions, name), dprims.DprimsError) for name in errors)


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(dprims, name)
    assert name in dir(dprims)
    assert value.__name__ == name
    assert _undocumented(value) == []


@pytest.mark.parametrize("name", sorted(SYNCHRONIZER))
def test_synchronizer_offers(name: str) -> None:
    module = import_module("dprims.synchronizer")
    assert name in module.__all__
    assert _undocumented(getattr(module, name)) == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = dprims.Nonsense


def test_import_loads_nothing_that_is_optional_or_slow() -> None:
    code = """
import sys
before = set(sys.modules)
import dprims
print(*sorted(set(sys.modules) - before))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(ran.stdout.split())
    assert {name for name in loaded if name.startswith("dprims")} == {"dprims"}
    assert not loaded & {"asyncio", "grpc", "importlib.metadata", "ray", "redis", "torch", "typer"}


def test_without_torch_every_name_says_how_to_get_it() -> None:
    code = """
import sys
from importlib import import_module
sys.modules["torch"] = None
import dprims.synchronizer as package
def load(name):
    return getattr(package, name) if name in package.__all__ else import_module(name)
for name in [*package.__all__, "dprims.engines.spmd", "dprims.testing.weights"]:
    try:
        load(name)
    except ImportError as error:
        print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    said = ran.stdout.splitlines()
    assert len(said) >= 10
    assert set(said) == {"MissingExtra torch is not installed; pip install 'dprims[torch]'"}


def _undocumented(value: object) -> list[str]:
    """The public things that *value* defines without a docstring, itself included."""
    name = value.__name__
    # A class inherits no docstring, and a dataclass that has none is given its signature.
    found = [] if value.__doc__ and not value.__doc__.startswith(f"{name}(") else [name]
    if inspect.isclass(value):
        members = [member for member in vars(value) if not member.startswith("_")]
        found += [f"{name}.{member}" for member in members if not _says_something(value, member)]
    return found


def _says_something(cls: type, member: str) -> bool:
    """Whether a method or property has a docstring, of its own or of the base that fixed its contract."""
    kinds = (property, classmethod, staticmethod)
    defined = vars(cls)[member]
    return not (callable(defined) or isinstance(defined, kinds)) or bool(inspect.getdoc(getattr(cls, member)))
