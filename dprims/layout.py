"""Parallel layouts: which rank belongs to which group, as plain arithmetic.

A layout is a value. It starts no process, imports no torch, and answers on a laptop for a job of a
hundred thousand ranks; `ParallelLayout.build` turns it into process groups inside a running job.

Ranks are numbers in a mixed radix: the axes are the digits, the first of ``order`` the most significant.
A group name is a choice of digits. The ranks of a group agree in every other digit, so each name
partitions the world, and head, members and index in a group are sums of ``digit * stride``.
"""

from __future__ import annotations

from math import prod
from operator import index

from . import _layout_digits as digits
from ._layout_degrees import AXES, divisors, expert_axes, integer, nearest, resolve, shown
from .exceptions import LayoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any, Literal, NoReturn

    from ._layout_digits import Digits
    from .mesh import Meshes
    from .tied import TiedParameters

_FORMAT = 1
_DEGREES = (*AXES, "ep", "etp")
_COMPOSED = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "cp_tp": ("cp", "tp"),
    "pp_cp_tp": ("pp", "cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
    "world": AXES,
}
_EXPERT = ("ep", "etp", "efsdp")
_GRID = "ep_tp"
ALIASES = {"dp_shard_cp": "fsdp", "loss": "dp_cp", "dp_shard_mod_ep": "efsdp"}
"""Second names of groups, as other frameworks call them."""


class ParallelLayout:
    """How `world_size` ranks divide into pipeline, data, context, tensor and expert parallel groups.

    ``pp * dp_replicate * dp_shard * cp * tp`` is the world size. `ep` is no factor of it: experts borrow
    their ranks from ``dp_shard * cp * tp`` when `etp` is 1, from ``dp_shard * cp`` when `etp` equals
    `tp`. Any one degree may be -1 and is then worked out (`ep` becomes all that it can borrow). `order`
    lists the five axes, the first varying slowest with the rank, the last fastest.

    Group names: the axes; ``dp``, ``fsdp`` (``dp_shard_cp``), ``dp_cp`` (``loss``), ``cp_tp``,
    ``pp_cp_tp``, ``stage``, ``world``; and with ``ep > 1`` also ``ep``, ``etp``, ``efsdp``
    (``dp_shard_mod_ep``). Every name exists at size 1 too, and partitions the world. Ranks in a group,
    and groups in a list, ascend. Any other name raises LayoutError with the names that exist.

    Immutable and hashable; two layouts are equal when degrees and order are. Everything but `build` is
    local, and takes the rank it asks about as an argument.
    """

    __slots__ = ("_strides", "cp", "dp_replicate", "dp_shard", "ep", "etp", "order", "pp", "tp", "world_size")

    world_size: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int
    order: tuple[str, ...]
    _strides: dict[str, int]

    def __init__(
        self,
        *,
        world_size: int,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        etp: int = 1,
        order: Sequence[str] = AXES,
    ) -> None:
        given = (pp, dp_replicate, dp_shard, cp, tp, ep, etp)
        degrees = resolve(world_size, dict(zip(_DEGREES, given, strict=True)))
        if isinstance(order, str) or sorted(order) != sorted(AXES):
            raise LayoutError(f"order={order!r} is not an order of the axes {', '.join(AXES)}")
        strides, stride = {}, 1
        for axis in reversed(order):
            strides[axis] = stride
            stride *= degrees[axis]
        values = {"world_size": index(world_size), **degrees, "order": tuple(order), "_strides": strides}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._expert_digits()

    # -- a value ---------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a ParallelLayout is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a ParallelLayout is immutable: cannot delete {name}")

    def _key(self) -> tuple[object, ...]:
        return (*(getattr(self, name) for name in _DEGREES), self.order)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ParallelLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        degrees = "".join(f", {axis}={getattr(self, axis)}" for axis in _DEGREES if getattr(self, axis) != 1)
        order = "" if self.order == AXES else f", order={self.order!r}"
        return f"ParallelLayout(world_size={self.world_size}{degrees}{order})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ParallelLayout.from_json, (self.to_json(),)

    def to_json(self) -> str:
        """Return the layout as one line of JSON, the same for equal layouts."""
        import json

        degrees = {axis: getattr(self, axis) for axis in _DEGREES}
        return json.dumps({"format": _FORMAT, "world_size": self.world_size, **degrees, "order": self.order})

    @classmethod
    def from_json(cls, text: str | bytes) -> ParallelLayout:
        """Return the layout that `to_json` wrote; LayoutError on anything else."""
        import json

        try:
            fields = json.loads(text)
        except ValueError as error:
            raise LayoutError(f"not the JSON of a layout: {error}") from None
        expected = {"format", "world_size", *_DEGREES, "order"}
        if not isinstance(fields, dict) or set(fields) != expected:
            found = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise LayoutError(
                f"not the JSON of a layout: expected the keys {sorted(expected)}, found {found}"
            )
        if fields.pop("format") != _FORMAT or not isinstance(fields["order"], list):
            raise LayoutError(f"not the JSON of a layout of format {_FORMAT}: {text!r}")
        return cls(**fields)

    @classmethod
    def from_mesh(cls, mesh: Any, *, ep: int = 1, etp: int = 1) -> ParallelLayout:
        """Return the layout of a torch ``DeviceMesh`` that spans the job.

        Its dimensions have to be named after axes (``dp`` is taken for ``dp_shard``) and its ranks to run
        from 0 in row-major order, as ``init_device_mesh`` makes them; LayoutError otherwise. A mesh does
        not carry expert degrees, so `ep` and `etp` are arguments.
        """
        names = tuple("dp_shard" if name == "dp" else name for name in mesh.mesh_dim_names or ())
        shape = tuple(mesh.mesh.shape)
        if len(names) != len(shape) or len(set(names)) != len(names) or not set(names) <= set(AXES):
            raise LayoutError(
                f"mesh dimensions {mesh.mesh_dim_names} of sizes {shape}: each has to be one of the axes "
                f"{', '.join(AXES)}"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise LayoutError(
                f"a mesh of the ranks {_brief(ranks)}: expected 0 to {len(ranks) - 1} in row-major order"
            )
        canonical = [axis for axis in AXES if axis in names] == list(names)
        order = AXES if canonical else (*(axis for axis in AXES if axis not in names), *names)
        degrees = dict(zip(names, shape, strict=True))
        return cls(world_size=len(ranks), **degrees, ep=ep, etp=etp, order=order)

    # -- names and sizes -------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The group names of this layout, without aliases; `grids` knows ``ep_tp`` besides."""
        return (*self.order, *_COMPOSED, *(_EXPERT if self.ep > 1 else ()))

    @property
    def sizes(self) -> dict[str, int]:
        """Each of the five axes with its degree, in `order`."""
        return {axis: getattr(self, axis) for axis in self.order}

    def size(self, name: str) -> int:
        """Return how many ranks a group of this name has."""
        return prod(size for size, _ in self._digits(name))

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Return the axes that a group of this name spans; of ``ep`` and ``efsdp`` all that they share."""
        name = self.canonical(name)
        spanned: tuple[str, ...]
        if name == "etp":
            spanned = ("tp",) if self.etp > 1 else ()
        elif name in _EXPERT:
            spanned = expert_axes(self.tp, self.etp)
        else:
            spanned = _COMPOSED.get(name, (name,))
        return tuple(axis for axis in self.order if axis in spanned)

    def canonical(self, name: str) -> str:
        """Return the name behind an alias, or the name itself; LayoutError when there is no such group."""
        found = ALIASES.get(name, name) if isinstance(name, str) else None
        if found in self.names:
            return str(found)
        hint = f"; {_GRID!r} is a grid: ask grids({_GRID!r})" if name == _GRID else ""
        hint = hint or ("; ep, etp and efsdp exist with ep > 1" if found in _EXPERT else "")
        aliases = ", ".join(
            f"{alias} = {target}" for alias, target in ALIASES.items() if target in self.names
        )
        raise LayoutError(f"no group {name!r} in this layout: {', '.join(self.names)} ({aliases}){hint}")

    # -- groups ----------------------------------------------------------------------------------------

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of a name, each a tuple of global ranks."""
        members = self._digits(name)
        return tuple(digits.group(head, members) for head in self.heads(name))

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """Return the global ranks of the group of this name that `rank` is in."""
        return digits.group(self.head_of(rank, name), self._digits(name))

    def head_of(self, rank: int, name: str) -> int:
        """Return the first rank of the group of this name that `rank` is in."""
        return digits.head(self._rank(rank), self._digits(name))

    def heads(self, name: str) -> tuple[int, ...]:
        """Return the first rank of every group of a name."""
        return tuple(digits.numbers(digits.rest(self.world_size, self._digits(name))))

    def index_in(self, rank: int, name: str) -> int:
        """Return the position of `rank` in its group of this name: torch's group rank."""
        return digits.index_in(self._rank(rank), self._digits(name))

    def grids(self, name: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the grids of a name: for ``ep_tp`` one ``[ep][etp]`` grid of ranks for each expert group."""
        if name != _GRID or self.ep == 1:
            known = f"only {_GRID!r} is one" if self.ep > 1 else f"{_GRID!r} is one, with ep > 1"
            raise LayoutError(f"no grid {name!r} in this layout: {known}")
        rows, columns = self._digits("ep"), self._digits("etp")
        corners = digits.numbers(digits.rest(self.world_size, (*rows, *columns)))
        return tuple(
            tuple(digits.group(corner + row, columns) for row in digits.numbers(rows)) for corner in corners
        )

    # -- coordinates -----------------------------------------------------------------------------------

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on each of the five axes, in `order`."""
        rank = self._rank(rank)
        return {axis: digits.position(rank, getattr(self, axis), self._strides[axis]) for axis in self.order}

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank at these axis positions; an axis that is left out counts as 0."""
        rank = 0
        for axis, position in coordinates.items():
            if axis not in AXES:
                raise LayoutError(f"no axis {axis!r}: {', '.join(self.order)}")
            size = getattr(self, axis)
            found = integer(position)
            if found is None:
                raise LayoutError(f"{axis}={shown(position)}: a position is an integer, 0 to {size - 1}")
            if not 0 <= found < size:
                raise LayoutError(f"{axis}={position!r} is outside the axis: 0 to {size - 1}")
            rank += found * self._strides[axis]
        return rank

    # -- pipeline and data parallel rules --------------------------------------------------------------

    def stage_heads(self) -> tuple[int, ...]:
        """Return the first rank of each pipeline stage, in stage order: position 0 on every other axis."""
        return self.group_of(0, "pp")

    def first_stage_ranks(self, schedule: Literal["loop", "v"] = "loop") -> tuple[int, ...]:
        """Return the ranks that hold the first model stage, and so see the input tokens.

        `schedule` is ``"loop"`` (1F1B, GPipe, Interleaved1F1B) or ``"v"`` (ZBVZeroBubble, DualPipeV).
        Both start on pipeline position 0.
        """
        _check_schedule(schedule)
        return self.group_of(self.rank_at(pp=0), "stage")

    def last_stage_ranks(self, schedule: Literal["loop", "v"] = "loop") -> tuple[int, ...]:
        """Return the ranks that hold the last model stage, and so compute the loss.

        With a ``"loop"`` schedule those of the last pipeline position; a ``"v"`` schedule comes back, and its
        last stage lies beside the first, on pipeline position 0.
        """
        _check_schedule(schedule)
        return self.group_of(self.rank_at(pp=0 if schedule == "v" else self.pp - 1), "stage")

    def data_parallel_rank(self, rank: int) -> int:
        """Return which of the ``dp_replicate * dp_shard`` batches `rank` works on."""
        return self.index_in(rank, "dp")

    @property
    def context_and_model_parallel_size(self) -> int:
        """How many ranks share one batch: ``pp * cp * tp``."""
        return self.pp * self.cp * self.tp

    @property
    def gradient_divide_factor(self) -> int:
        """By what summed gradients are divided for their mean: ``dp_replicate * dp_shard * cp``."""
        return self.dp_replicate * self.dp_shard * self.cp

    def seq_len_divisor(self, *, load_balanced: bool = True) -> int:
        """Return what a padded sequence length has to be a multiple of.

        ``tp * cp``, twice that with `load_balanced` context parallelism, where each rank takes one chunk
        from the front and one from the back.
        """
        return self.tp * self.cp * (2 if load_balanced else 1)

    # -- checks ----------------------------------------------------------------------------------------

    def require_divisible(self, what: str, value: int, by: str) -> int:
        """Return `value` over the size of the group `by`; LayoutError, naming `what`, unless it divides."""
        size = self.size(by)
        if integer(value) is None:
            raise LayoutError(f"{what}={shown(value)}: an integer is expected, to be divided by {by}={size}")
        if value % size:
            raise LayoutError(
                f"{what}={value} is not divisible by {by}={size}; sizes of {by} that work: "
                f"{nearest(size, divisors(value)) if value > 0 else 'none'}"
            )
        return value // size

    def require_untied_weights(self, tied: bool | Collection[TiedParameters]) -> None:
        """Refuse tied weights that pipeline parallelism would separate.

        `tied` is a flag, or what `dprims.tied.find_tied_parameters` returned; parameters known to share one
        stage are allowed. Raises LayoutError when ``pp > 1`` and weights are tied.
        """
        if self.pp == 1 or not tied:
            return
        parted = () if isinstance(tied, bool) else tuple(pair for pair in tied if not pair.on_one_stage)
        if isinstance(tied, bool) or parted:
            what = "; ".join(map(str, parted)) or "the model's weights are tied"
            raise LayoutError(
                f"pp={self.pp} puts tied parameters on separate ranks, where they would drift apart: {what}; "
                f"untie them, or use pp=1"
            )

    # -- views of it -----------------------------------------------------------------------------------

    def render(
        self,
        style: Literal["text", "svg"] = "text",
        *,
        rank: int | None = None,
        group: str = "pp_cp_tp",
        color: bool = False,
    ) -> str:
        """Return a picture of the layout: ranks by pipeline stage, the groups of one name told apart.

        `group` is the name that is coloured, `rank` one rank whose groups are listed (0 unless given).
        ``"text"`` is for a terminal, with ANSI colours when `color`; ``"svg"`` is a stand-alone document.
        Of a very large layout only the edges are drawn.
        """
        from ._layout_render import text
        from ._layout_svg import svg

        self._rank(rank or 0)
        self.canonical(group)
        if style == "text":
            return text(self, rank=rank, group=group, color=color)
        if style == "svg":
            return svg(self, rank=rank, group=group)
        raise LayoutError(f"style={style!r}: expected 'text' or 'svg'")

    def build(self, device_type: str, *, cpu_twins: bool = False, timeout: float | None = None) -> Meshes:
        """Make the process groups and meshes of this layout. Collective: every rank of the job calls it.

        See `dprims.mesh.build`, which this is.
        """
        from .mesh import build

        return build(self, device_type, cpu_twins=cpu_twins, timeout=timeout)

    # -- digits ----------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> int:
        found = integer(rank)
        if found is None:
            raise LayoutError(f"rank {shown(rank)}: a rank is an integer, 0 to {self.world_size - 1}")
        if not 0 <= found < self.world_size:
            raise LayoutError(f"rank {rank!r} is outside the layout: 0 to {self.world_size - 1}")
        return found

    def _axis_digits(self, axes: Iterable[str]) -> Digits:
        """Return the digits of these axes, neighbours merged into one."""
        found: list[tuple[int, int]] = []
        for axis in self.order:
            size, stride = getattr(self, axis), self._strides[axis]
            if axis not in axes or size == 1:
                continue
            if found and found[-1][1] == size * stride:
                size *= found.pop()[0]
            found.append((size, stride))
        return tuple(found)

    def _digits(self, name: str) -> Digits:
        name = self.canonical(name)
        if name in ("ep", "efsdp"):
            high, low = self._expert_digits()
            return low if name == "ep" else high
        return self._axis_digits(self.axes_of(name))

    def _expert_digits(self) -> tuple[Digits, Digits]:
        """Return the digits of efsdp and of ep, which is the low part of all that it borrows."""
        borrowed = self._axis_digits(expert_axes(self.tp, self.etp))
        parts = digits.cut(borrowed, self.ep)
        if parts is None:
            sizes = [
                size for size in divisors(prod(size for size, _ in borrowed)) if digits.cut(borrowed, size)
            ]
            raise LayoutError(
                f"ep={self.ep} does not cut {' x '.join(str(size) for size, _ in borrowed)} ranks, which "
                f"order={self.order} keeps apart; nearest sizes that work: {nearest(self.ep, sizes)}"
            )
        return parts


def _check_schedule(schedule: str) -> None:
    if schedule not in ("loop", "v"):
        raise LayoutError(f"schedule={schedule!r}: expected 'loop' (1F1B, GPipe) or 'v' (ZBV, DualPipeV)")


def _brief(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:8]))}, ...]"
