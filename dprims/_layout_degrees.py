"""Check parallel degrees against a world size, and say which sizes would have worked.

Standard library only, and light: no ``dataclasses`` and no ``typing`` at run time, since a layout is
part of the price of ``import dprims``.
"""

from __future__ import annotations

from math import isqrt, prod
from operator import index

from .exceptions import LayoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes whose degrees multiply to the world size, in the default order, last fastest."""

INFER = -1
_RULE = "a degree is an integer >= 1, or -1 for one that is to be inferred"


def resolve(world_size: object, degrees: Mapping[str, object]) -> dict[str, int]:
    """Return every degree as an int, the one given as -1 worked out.

    `degrees` maps the five axes, ``ep`` and ``etp`` to what the caller gave. Raises LayoutError, which
    names the axis, the value and the nearest sizes that would work.
    """
    world = integer(world_size)
    if world is None or world < 1:
        raise LayoutError(f"world_size={shown(world_size)}: the number of ranks is an integer >= 1")
    unknown = [axis for axis, value in degrees.items() if integer(value) == INFER]
    if len(unknown) > 1:
        raise LayoutError(
            f"{' and '.join(f'{axis}=-1' for axis in unknown)}: only one degree can be inferred"
        )

    dense = _dense_degrees(world, degrees)
    _fill(world, dense)
    etp = _expert_tensor_degree(degrees["etp"], dense["tp"])
    ep = _expert_degree(degrees["ep"], etp, dense)
    return {**dense, "ep": ep, "etp": etp}


def expert_axes(tp: int, etp: int) -> tuple[str, ...]:
    """Return the axes that ep borrows its ranks from."""
    return ("dp_shard", "cp") if etp == tp > 1 else ("dp_shard", "cp", "tp")


def nearest(value: object, candidates: Iterable[int], count: int = 3) -> str:
    """Return the candidates nearest to `value`, smallest first, as text."""
    target = integer(value) or 1
    chosen = sorted(sorted(candidates, key=lambda size: (abs(size - target), size))[:count])
    return ", ".join(map(str, chosen)) or "none"


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, ascending."""
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def integer(value: object) -> int | None:
    """Return `value` as an int, or None when it is no integer; True, 2.0 and "2" are none."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def shown(value: object) -> str:
    """Return a value as errors show it: with its type, where that is the trouble."""
    return repr(value) if integer(value) is not None else f"{value!r} ({type(value).__name__})"


def _dense_degrees(world: int, degrees: Mapping[str, object]) -> dict[str, int]:
    """Return the degrees of the five axes, -1 among them; LayoutError naming all that are none."""
    values = {axis: integer(degrees[axis]) for axis in AXES}
    sound = {
        axis: value for axis, value in values.items() if value is not None and (value >= 1 or value == INFER)
    }
    bad = [axis for axis in AXES if axis not in sound]
    if not bad:
        return sound
    others = [value for value in sound.values() if value != INFER]
    fitting = _fitting(world, others, exact=len(others) == len(AXES) - 1)
    raise LayoutError(
        f"{', '.join(f'{axis}={shown(degrees[axis])}' for axis in bad)}: {_RULE}; sizes that work in "
        f"world_size={world}: {'; '.join(f'{axis}={nearest(values[axis], fitting)}' for axis in bad)}"
    )


def _fitting(world: int, others: Iterable[int], *, exact: bool) -> list[int]:
    """Return the sizes that one axis can have beside `others`; `exact` when it has to fill the world."""
    rest, remainder = divmod(world, prod(others))
    if remainder:
        return []
    return [rest] if exact else divisors(rest)


def _fill(world: int, dense: dict[str, int]) -> None:
    """Work out the inferred axis in place, or check that the product is the world size."""
    inferred = next((axis for axis in AXES if dense[axis] == INFER), None)
    known = {axis: size for axis, size in dense.items() if axis != inferred}
    product = prod(known.values())
    if inferred is not None and world % product == 0:
        dense[inferred] = world // product
    elif inferred is not None:
        below = world // product * product
        raise LayoutError(
            f"{inferred}=-1 cannot be inferred: world_size={world} is not a multiple of {_terms(known)} "
            f"(remainder {world % product}); nearest sizes that work: "
            f"world_size={nearest(world, [size for size in (below, below + product) if size])}"
            f"{_alternatives(world, known, exact=False)}"
        )
    elif product != world:
        raise LayoutError(
            f"{_terms(known)} ranks, but world_size={world}; sizes that work: world_size={product}"
            f"{_alternatives(world, known, exact=True)}"
        )


def _terms(sizes: Mapping[str, int]) -> str:
    factors = {axis: size for axis, size in sizes.items() if size != 1} or {"dp_shard": 1}
    text = " * ".join(f"{axis}={size}" for axis, size in factors.items())
    return text if len(factors) == 1 else f"{text} = {prod(factors.values())}"


def _alternatives(world: int, sizes: Mapping[str, int], *, exact: bool) -> str:
    """Return ``; or tp=2; or pp=1``: the changes of one axis that would make the degrees fit."""
    text = ""
    for axis, size in sizes.items():
        fitting = _fitting(world, [other for name, other in sizes.items() if name != axis], exact=exact)
        if fitting and (size != 1 or axis == "dp_shard"):
            text += f"; or {axis}={nearest(size, fitting)}"
            text += " (dp_shard=-1 infers it)" if exact and axis == "dp_shard" else ""
    return text


def _expert_tensor_degree(given: object, tp: int) -> int:
    value = integer(given)
    if value in (1, tp):
        return value
    sizes = "1" if tp == 1 else f"1, {tp}"
    raise LayoutError(
        f"etp={shown(given)}: experts are split like tp={tp} or not at all; sizes that work: {sizes}"
    )


def _expert_degree(given: object, etp: int, dense: Mapping[str, int]) -> int:
    borrowed = {axis: dense[axis] for axis in expert_axes(dense["tp"], etp)}
    region = prod(borrowed.values())
    value = integer(given)
    if value == INFER:
        return region
    if value is not None and value >= 1 and region % value == 0:
        return value
    reason = "does not divide them" if value is not None and value >= 1 else _RULE
    raise LayoutError(
        f"ep={shown(given)}: {reason}; with etp={etp} experts borrow {'*'.join(borrowed)}={region} ranks, "
        f"nearest sizes that work: {nearest(value, divisors(region))}"
    )
