"""Loads the gRPC stubs of the ``etcd3`` package under every protobuf that is in use.

The stubs of etcd3 0.12.0 were generated long ago: under protobuf >= 4 they raise ``TypeError``. Those
of ``etcd3-fc`` load, but register ``kv.proto`` for the whole process, so that no other etcd client can
be imported beside them. Both carry the wire format as one serialised descriptor; this module reads
that literal from their source and builds the same message classes from it, in a descriptor pool of
its own. Under protobuf < 4.22, which cannot do that, the stubs are loaded as they are.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from dprims.backend import need
from dprims.exceptions import BackendMisconfigured

_PACKAGE = "etcd3.etcdrpc"
_FILES = {f"{_PACKAGE}.{stem}_pb2": f"{stem}.proto" for stem in ("kv", "auth", "rpc")}
_LOCK = threading.Lock()


def load_etcdrpc() -> Any:
    """Import ``etcd3.etcdrpc``: the messages and stubs of etcd's API.

    ``import etcd3`` works afterwards. Raises :class:`~dprims.exceptions.MissingExtra` without etcd3, and
    :class:`~dprims.exceptions.BackendMisconfigured` with etcd3 0.12.0 under protobuf 4.21, which is too
    new for its stubs and too old for their rebuilding.
    """
    with _LOCK:
        if _PACKAGE in sys.modules:
            return sys.modules[_PACKAGE]
        protobuf = need("google.protobuf", "etcd")
        factory = need("google.protobuf.message_factory", "etcd")
        if not hasattr(factory, "GetMessageClass"):
            return _load_as_is(protobuf.__version__)
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        try:
            return need(_PACKAGE, "etcd")
        finally:
            sys.meta_path.remove(finder)


def _load_as_is(version: str) -> Any:
    try:
        return need(_PACKAGE, "etcd")
    except TypeError as error:
        raise BackendMisconfigured(
            f"etcd3 0.12.0 does not load under protobuf {version}; expected >= 4.22 or < 3.21, or etcd3-fc"
        ) from error


class _Finder(MetaPathFinder):
    """Finds exactly the generated modules of etcd3, when their descriptor can be read from the source."""

    def __init__(self) -> None:
        self._pool = need("google.protobuf.descriptor_pool", "etcd").DescriptorPool()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _FILES:
            return None
        found = PathFinder.find_spec(name, path)
        if found is None or found.origin is None or not found.origin.endswith(".py"):
            return found
        serialized = _serialized_descriptor(Path(found.origin), _FILES[name])
        if serialized is None:
            return found
        return spec_from_loader(name, _Loader(self._pool, _FILES[name], serialized), origin=found.origin)


class _Loader(Loader):
    """Makes a generated module's classes and enums from its serialised descriptor."""

    def __init__(self, pool: Any, file_name: str, serialized: bytes) -> None:
        self._pool = pool
        self._file_name = file_name
        self._serialized = serialized

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == f"{_PACKAGE}.rpc_pb2":  # rpc.proto refers to the types of the other two
            need(f"{_PACKAGE}.kv_pb2", "etcd")
            need(f"{_PACKAGE}.auth_pb2", "etcd")
        factory = need("google.protobuf.message_factory", "etcd")
        wrapper = need("google.protobuf.internal.enum_type_wrapper", "etcd")
        self._pool.AddSerializedFile(self._serialized)
        file = self._pool.FindFileByName(self._file_name)
        module.DESCRIPTOR = file  # type: ignore[attr-defined]
        for name, message in file.message_types_by_name.items():
            setattr(module, name, factory.GetMessageClass(message))
        for name, enum in file.enum_types_by_name.items():
            setattr(module, name, wrapper.EnumTypeWrapper(enum))
            for value in enum.values:
                setattr(module, value.name, value.number)


def _serialized_descriptor(source: Path, file_name: str) -> bytes | None:
    """The literal in a generated module that is the serialised descriptor of *file_name*, if there is one."""
    start = bytes([0x0A, len(file_name)]) + file_name.encode()  # field 1 of a FileDescriptorProto: its name
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            value = node.value
            try:
                literal = value if isinstance(value, bytes) else value.encode("latin-1")
            except UnicodeEncodeError:
                continue
            if literal.startswith(start) and len(literal) > len(start):
                return literal
    return None
