"""What pip installs: the wheel, built from the checkout and from the sdist, opened, installed and used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import dprims
from dprims import backend

ROOT = Path(__file__).parent.parent
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
VERSION = dprims.__version__

# Runs in the installed copy: says of each public name, and of each module named, what its import gave.
IMPORT = """
import importlib, json, sys
target, *modules = sys.argv[1:]
sys.path.insert(0, target)
import dprims
told = {}
def attempt(name, load, *arguments):
    try:
        load(*arguments)
        told[name] = "imported"
    except ImportError as error:
        told[name] = f"{type(error).__name__}: {error}"
for name in dprims.__all__:
    attempt(name, getattr, dprims, name)
for module in modules:
    attempt(module, importlib.import_module, module)
ours = {name: str(module.__file__) for name, module in sys.modules.items() if name.startswith("dprims")}
strangers = {name: file for name, file in ours.items() if not file.startswith(target)}
assert not strangers, strangers
print(json.dumps(told))
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, the link among them: a build leaves folders where it runs."""
    copy = tmp_path_factory.mktemp("checkout") / "dprims"
    unwanted = shutil.ignore_patterns(
        ".*", "build", "dist", "site", "tests", "docs", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=unwanted)
    assert (copy / "dprims" / "backends").is_symlink()
    return copy


def build_wheel(source: Path, target: Path) -> Path:
    python(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(target), str(source), cwd=target)
    return target / f"dprims-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    python(*PIP, "install", "--no-deps", "--no-compile", "--target", str(target), str(wheel), cwd=target)
    return target


@pytest.fixture(scope="module")
def archive(wheel: Path) -> Iterator[ZipFile]:
    with ZipFile(wheel) as archive:
        yield archive


def test_wheel_has_every_module_once_and_nothing_beside_the_package(archive: ZipFile, checkout: Path) -> None:
    names = archive.namelist()
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {"dprims", f"dprims-{VERSION}.dist-info"}
    sources = {path.relative_to(checkout) for path in (checkout / "dprims").rglob("*.py")}
    sources |= {"dprims" / path.relative_to(checkout) for path in (checkout / "backends").rglob("*.py")}
    assert {Path(name) for name in names if name.endswith(".py")} == sources
    assert {"dprims/py.typed", "dprims/cli/_status.html"} <= set(names)


def test_sdist_gives_the_same_wheel(checkout: Path, archive: ZipFile, tmp_path: Path) -> None:
    python("-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=checkout)
    with ZipFile(build_wheel(checkout / "dist" / f"dprims-{VERSION}.tar.gz", tmp_path)) as other:
        assert {file.filename: file.CRC for file in other.filelist} == {
            file.filename: file.CRC for file in archive.filelist
        }


def test_base_install_has_no_dependency(archive: ZipFile) -> None:
    metadata = Parser().parsestr(archive.read(f"dprims-{VERSION}.dist-info/METADATA").decode())
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert all("extra ==" in needed for needed in metadata.get_all("Requires-Dist"))
    extras = "all bench cli demo dev docs etcd metrics ray redis test torch"
    assert set(metadata.get_all("Provides-Extra")) == set(extras.split())
    assert f"dprims-{VERSION}.dist-info/licenses/LICENSE" in archive.namelist()


def test_entry_points_are_the_backends_that_connect_knows(archive: ZipFile) -> None:
    entries = ConfigParser()
    entries.read_string(archive.read(f"dprims-{VERSION}.dist-info/entry_points.txt").decode())
    assert dict(entries["console_scripts"]) == {"dprims": "dprims.cli:main"}
    assert dict(entries[backend.ENTRY_POINTS]) == backend._BUILT_IN


def test_public_names_import_where_nothing_else_is_installed(installed: Path) -> None:
    modules = sorted({path.partition(":")[0] for path in backend._BUILT_IN.values()})
    modules += ["dprims.cli", "dprims.synchronizer.protocol", "dprims.synchronizer.plan"]
    told = json.loads(python("-I", "-S", "-c", IMPORT, str(installed), *modules, cwd=installed).stdout)
    # What cannot be without a client or torch says which extra brings it.
    extras = {"Meshes": "torch", "dprims.backends.etcd": "etcd", "dprims.backends.redis": "redis"}
    extras["dprims.backends.tcpstore"] = "torch"
    for name, extra in extras.items():
        message = told.pop(name)
        assert message == "imported" or message.endswith(f" is not installed; pip install 'dprims[{extra}]'")
    assert told.keys() == {*dprims.__all__, *modules} - extras.keys()
    assert {name: why for name, why in told.items() if why != "imported"} == {}


def test_everything_imports_where_the_extras_are_installed(installed: Path, archive: ZipFile) -> None:
    files = [
        name.removesuffix("/__init__.py").removesuffix(".py")
        for name in archive.namelist()
        if name.endswith(".py")
    ]
    modules = [name.replace("/", ".") for name in files if not name.endswith("__main__")]
    told = json.loads(python("-I", "-c", IMPORT, str(installed), *modules, cwd=installed).stdout)
    assert told.keys() == {*dprims.__all__, *modules}
    kernels = told.pop("dprims.synchronizer.kernels")  # torch for CUDA brings Triton, that for CPUs does not
    assert kernels in ("imported", "ModuleNotFoundError: No module named 'triton'")
    assert {name: why for name, why in told.items() if why != "imported"} == {}


def test_command_line_without_its_extra_is_one_line_that_names_it(installed: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from dprims.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", code, str(installed), "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == "dprims: typer is not installed; pip install 'dprims[cli]'\n"


def test_backends_are_no_package_of_their_own(installed: Path) -> None:
    told = "import this package as dprims.backends, not as backends"
    code = f"try: import backends\nexcept ImportError as error: assert str(error) == {told!r}, error"
    python("-c", code + "\nelse: raise SystemExit('imported')", cwd=ROOT)
    with pytest.raises(AssertionError, match="No module named 'backends'"):
        python("-I", "-S", "-c", "import backends", cwd=installed)
