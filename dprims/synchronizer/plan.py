"""The transfer plan: which bytes of which tensor travel in which bucket.

A plan is a pure value. The sender builds it from its metadata and one number, `bucket_bytes`; it travels
once, and each side walks the same buckets in the same order. Nothing is derived from free memory or from the
environment, so equal input gives an equal plan, and `digest` proves that two ranks hold the same one.

Two lanes. Large contiguous tensors go *direct*: uncopied, each piece a broadcast of its own, cut at
`bucket_bytes`. The rest is *packed*: whole tensors side by side at aligned offsets of one flat bucket, which
is one broadcast. The first and the last packed buckets are small, for nothing hides the packing of the first
nor the arrival of the last. Buckets are ordered by the last tensor that they need, so a source that is read
once, front to back, never has to hold more than the two buckets that are open.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

from ..exceptions import HandshakeMismatch

__all__ = ["KV_SCALES", "Bucket", "Lane", "Piece", "Plan", "TensorMeta"]

Lane = Literal["direct", "packed"]

FORMAT = 1
"""Version of the layout rules and of the encoding; part of every digest."""

KV_SCALES = "__kv_scales__"
"""Name of the one float32 tensor that carries all scales, after the weights."""

DIRECT_BYTES = (2 << 20, 16 << 20)
"""Contiguous tensors travel uncopied from a quarter of a bucket on, which is kept between these two."""

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8,
    "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8,
    "complex128": 16, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes an element takes, for each dtype that can travel."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a receiver has to know about a tensor before its bytes come.

    Args:
        name: the parameter's name, unique within a plan.
        shape: the full (global) shape.
        dtype: torch's name for the element type, without `torch.`.
        alias_of: the name of the tensor whose storage this one shares; its bytes do not travel again.
        strided: not contiguous in the sender's memory, so it is packed whatever its size (above
            `bucket_bytes` it goes direct, from a contiguous copy).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    alias_of: str | None = None
    strided: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the contiguous tensor. Raises ValueError for an unknown dtype or a negative extent."""
        size = ITEM_BYTES.get(self.dtype)
        if size is None:
            raise ValueError(
                f"tensor {self.name!r} has dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}"
            )
        if self.shape and min(self.shape) < 0:
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; extents are at least 0")
        return math.prod(self.shape) * size

    def __str__(self) -> str:
        text = f"{self.name!r} {self.dtype}{list(self.shape)}"
        return f"{text} (alias of {self.alias_of!r})" if self.alias_of else text


class Piece(NamedTuple):
    """Bytes [start, stop) of `plan.tensors[tensor]`, at `offset` of the bucket."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The unit of transfer, of verification, and of progress.

    Pieces lie at aligned offsets, and `nbytes` counts the gaps. A packed bucket holds whole tensors and
    travels as one; a direct bucket holds whole tensors or chunks, and each travels by itself.
    """

    index: int
    lane: Lane
    pieces: tuple[Piece, ...]
    nbytes: int
    whole: bool
    """Whether every piece is a whole tensor."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a list of tensors travels. Build one with `Plan.build`; `tensors` are those whose bytes travel."""

    tensors: tuple[TensorMeta, ...]
    aliases: tuple[tuple[str, str], ...]
    kv_scales: tuple[str, ...]
    bucket_bytes: int
    align: int
    direct_bytes: int
    buckets: tuple[Bucket, ...] = field(repr=False)
    metas: tuple[TensorMeta, ...] = field(repr=False)
    """All that a receiver is given, by name: what travels, the aliases, then each scale by itself."""
    nbytes: int
    digest: str

    @classmethod
    def build(
        cls,
        metas: Iterable[TensorMeta],
        *,
        bucket_bytes: int,
        align: int = 256,
        direct_bytes: int | None = None,
        kv_scales: Iterable[str] = (),
    ) -> Plan:
        """Lay out `metas`, in their order.

        Args:
            metas: every tensor of the source; an alias may come before or after the tensor that it shares.
            bucket_bytes: the size of a full bucket, a multiple of `align`.
            align: where tensors may begin within a packed bucket, in bytes; a power of two, at least 16.
            direct_bytes: contiguous tensors from this size travel uncopied; by default a quarter of a bucket,
                but 2 MiB at least and 16 MiB at most.
            kv_scales: names of scales; they travel after the weights, sorted, as one float32 tensor.

        Raises:
            ValueError: a name twice, an unknown dtype, an alias of nothing, or sizes that do not fit
                together.
        """
        if align < 16 or align & (align - 1):
            raise ValueError(f"align is {align}; it is a power of two and at least 16")
        if bucket_bytes < align or bucket_bytes % align:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; it is a multiple of align ({align})")
        low, high = DIRECT_BYTES
        usual = min(bucket_bytes, max(low, min(high, bucket_bytes // 4)))
        threshold = usual if direct_bytes is None else direct_bytes
        if not 0 < threshold <= bucket_bytes:
            raise ValueError(
                f"direct_bytes is {threshold}; it lies between 1 and bucket_bytes ({bucket_bytes})"
            )
        tensors, aliases, scales = _sort_out(metas, tuple(sorted(kv_scales)))
        sizes = [meta.nbytes for meta in tensors]
        buckets = _lay_out(tensors, sizes, bucket_bytes, align, threshold)
        digest = hashlib.sha256(_encode(tensors, aliases, scales, bucket_bytes, align, threshold))
        for bucket in buckets:
            digest.update(struct.pack("<?QQ", bucket.lane == "direct", len(bucket.pieces), bucket.nbytes))
            digest.update(struct.pack(f"<{4 * len(bucket.pieces)}Q", *chain.from_iterable(bucket.pieces)))
        return cls(
            tensors=tensors,
            aliases=aliases,
            kv_scales=scales,
            bucket_bytes=bucket_bytes,
            align=align,
            direct_bytes=threshold,
            buckets=buckets,
            metas=_given(tensors, aliases, scales),
            nbytes=sum(sizes),
            digest=digest.hexdigest(),
        )

    @property
    def packed_bytes(self) -> int:
        """Size of the largest packed bucket: what one wire buffer has to hold. 0 without any."""
        return max((b.nbytes for b in self.buckets if b.lane == "packed"), default=0)

    def names(self, bucket: Bucket) -> str:
        """The tensors of a bucket, for a message: at most three by name."""
        names = [repr(self.tensors[piece.tensor].name) for piece in bucket.pieces]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def to_bytes(self) -> bytes:
        """The plan, compressed; equal plans give equal bytes. `from_bytes` lays it out again."""
        return zlib.compress(
            _encode(
                self.tensors, self.aliases, self.kv_scales, self.bucket_bytes, self.align, self.direct_bytes
            ),
            1,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """The plan that `to_bytes` encoded.

        Raises HandshakeMismatch when the encoding is of another version, ValueError when it is no plan.
        """
        try:
            raw: dict[str, Any] = json.loads(zlib.decompress(data))
            version = raw["format"]
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{len(data)} bytes that are no plan: {error}") from None
        if version != FORMAT:
            raise HandshakeMismatch(f"the plan is in format {version}, this side reads format {FORMAT}")
        metas = [TensorMeta(n, tuple(shape), dtype, None, bool(s)) for n, shape, dtype, s in raw["tensors"]]
        if raw["kv_scales"]:
            metas.pop()
        if raw["aliases"]:
            by_name = {meta.name: meta for meta in metas}
            metas += [TensorMeta(a, by_name[n].shape, by_name[n].dtype, n) for a, n in raw["aliases"]]
        return cls.build(
            metas,
            bucket_bytes=raw["bucket_bytes"],
            align=raw["align"],
            direct_bytes=raw["direct_bytes"],
            kv_scales=raw["kv_scales"],
        )

    def first_difference(
        self, other: Plan, *, ours: str = "this side", theirs: str = "the other"
    ) -> str | None:
        """In words, the first thing in which two plans differ; None when they are the same plan."""
        if self.digest == other.digest:
            return None
        for name in ("bucket_bytes", "align", "direct_bytes"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return f"{name} is {mine} on {ours} and {its} on {theirs}"
        for index, (a, b) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if a != b:
                how = " (contiguous on one side only)" if str(a) == str(b) else ""
                return f"tensor {index} is {a} on {ours} and {b} on {theirs}{how}"
        if len(self.tensors) != len(other.tensors):
            more, who = (self, ours) if len(self.tensors) > len(other.tensors) else (other, theirs)
            index = min(len(self.tensors), len(other.tensors))
            return f"tensor {index}, {more.tensors[index]}, is there on {who} only"
        if self.aliases != other.aliases:
            odd = sorted(set(self.aliases) ^ set(other.aliases))[0]
            return f"the alias {odd[0]!r} of {odd[1]!r} is on {ours if odd in self.aliases else theirs} only"
        if self.kv_scales != other.kv_scales:
            scale = sorted(set(self.kv_scales) ^ set(other.kv_scales))[0]
            return f"the scale {scale!r} is on {ours if scale in self.kv_scales else theirs} only"
        return f"the same tensors are laid out otherwise on {ours} and {theirs}: different versions of dprims"


def _sort_out(
    metas: Iterable[TensorMeta], scales: tuple[str, ...]
) -> tuple[tuple[TensorMeta, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Separate what travels from its aliases, and append the scales."""
    everything = {}
    for meta in metas:
        if meta.name in everything or meta.name == KV_SCALES:
            raise ValueError(f"the tensor name {meta.name!r} is taken already")
        everything[meta.name] = meta
    aliases = []
    tensors = []
    for meta in everything.values():
        if meta.alias_of is None:
            tensors.append(meta)
            continue
        target = everything.get(meta.alias_of)
        if target is None or target.alias_of is not None:
            raise ValueError(f"{meta}: there is no tensor of that name with bytes of its own")
        if (target.shape, target.dtype) != (meta.shape, meta.dtype):
            raise ValueError(f"{meta} differs in shape or dtype from {target}")
        aliases.append((meta.name, meta.alias_of))
    if scales:
        doubled = next((n for i, n in enumerate(scales) if n in everything or n in scales[:i]), None)
        if doubled is not None:
            raise ValueError(f"the scale name {doubled!r} is taken already")
        tensors.append(TensorMeta(KV_SCALES, (len(scales),), "float32"))
    return tuple(tensors), tuple(sorted(aliases)), scales


def _given(
    tensors: tuple[TensorMeta, ...], aliases: tuple[tuple[str, str], ...], scales: tuple[str, ...]
) -> tuple[TensorMeta, ...]:
    weights = tensors[: len(tensors) - bool(scales)]
    by_name = {meta.name: meta for meta in weights} if aliases else {}
    shared = (TensorMeta(a, by_name[n].shape, by_name[n].dtype, n) for a, n in aliases)
    return (*weights, *shared, *(TensorMeta(name, (), "float32") for name in scales))


def _lay_out(
    tensors: Sequence[TensorMeta], sizes: Sequence[int], bucket_bytes: int, align: int, threshold: int
) -> tuple[Bucket, ...]:
    def aligned(nbytes: int) -> int:
        return -(-nbytes // align) * align

    def is_direct(index: int) -> bool:
        size = sizes[index]
        return size > bucket_bytes or (size >= threshold and not tensors[index].strided)

    left = sum(aligned(size) for index, size in enumerate(sizes) if not is_direct(index))
    smallest = max(align, aligned(bucket_bytes // 8))
    closed: list[tuple[Lane, list[Piece], int]] = []
    packed: list[Piece] = []
    direct: list[Piece] = []
    filled = sent = packed_count = 0

    def room() -> int:
        growing = bucket_bytes >> max(0, 3 - packed_count)
        return max(smallest, aligned(min(growing, bucket_bytes, left // 2)))

    capacity = room()
    for index, size in enumerate(sizes):
        if is_direct(index):
            start = 0
            while start < size:
                if sent == bucket_bytes:
                    closed.append(("direct", direct, sent))
                    direct, sent = [], 0
                stop = min(size, start + bucket_bytes - sent)
                # a tensor that fits into a bucket of its own is not cut to fill up the one before
                if stop < size <= bucket_bytes and direct:
                    closed.append(("direct", direct, sent))
                    direct, sent = [], 0
                    stop = size
                direct.append(Piece(index, start, stop, sent))
                sent = min(bucket_bytes, aligned(sent + stop - start))
                start = stop
            continue
        if packed and filled + aligned(size) > capacity:
            closed.append(("packed", packed, filled))
            left -= filled
            packed, filled = [], 0
            packed_count += 1
            capacity = room()
        packed.append(Piece(index, 0, size, filled))
        filled += aligned(size)
    if direct:
        closed.append(("direct", direct, sent))
    if packed:
        closed.append(("packed", packed, filled))
    # ready first is sent first; a stable order for two buckets that end in the same tensor
    closed.sort(key=lambda bucket: (bucket[1][-1].tensor, bucket[1][-1].stop))
    return tuple(
        Bucket(
            index, lane, tuple(pieces), size, all(p.start == 0 and p.stop == sizes[p.tensor] for p in pieces)
        )
        for index, (lane, pieces, size) in enumerate(closed)
    )


def _encode(
    tensors: Sequence[TensorMeta],
    aliases: Sequence[tuple[str, str]],
    scales: Sequence[str],
    bucket_bytes: int,
    align: int,
    direct_bytes: int,
) -> bytes:
    """The canonical form: what is hashed, and what travels."""
    return json.dumps(
        {
            "format": FORMAT,
            "bucket_bytes": bucket_bytes,
            "align": align,
            "direct_bytes": direct_bytes,
            "tensors": [(m.name, m.shape, m.dtype, int(m.strided)) for m in tensors],
            "aliases": aliases,
            "kv_scales": scales,
        },
        separators=(",", ":"),
    ).encode()
