"""Mixed-radix arithmetic on ranks: the numbers behind every group of a layout.

A digit is a pair ``(size, stride)``: the position ``rank // stride % size``. The digits of a world are
nested (each stride is the product of all smaller sizes), so any choice of them partitions the world.
Digits are listed most significant first; none has size 1.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Digits = tuple[tuple[int, int], ...]


def position(rank: int, size: int, stride: int) -> int:
    """Return the value of one digit of a rank."""
    return rank // stride % size


def head(rank: int, digits: Digits) -> int:
    """Return `rank` with these digits set to 0: the first rank of its group."""
    return rank - sum(position(rank, size, stride) * stride for size, stride in digits)


def index_in(rank: int, digits: Digits) -> int:
    """Return the position of `rank` in its group."""
    result = 0
    for size, stride in digits:
        result = result * size + position(rank, size, stride)
    return result


def numbers(digits: Digits) -> Sequence[int]:
    """Return all numbers that have any value in these digits and 0 elsewhere, ascending."""
    found: Sequence[int] = range(1)
    for size, stride in digits:
        steps = range(0, size * stride, stride)
        found = steps if len(found) == 1 else [number + step for number in found for step in steps]
    return found


def group(first: int, digits: Digits) -> tuple[int, ...]:
    """Return the ranks of the group whose head is `first`, ascending."""
    if len(digits) == 1:
        ((size, stride),) = digits
        return tuple(range(first, first + size * stride, stride))
    return tuple([first + number for number in numbers(digits)])


def rest(world_size: int, digits: Digits) -> Digits:
    """Return the digits of the world that `digits` leaves out."""
    missing, stride = [], 1
    for size, start in sorted(digits, key=lambda digit: digit[1]):
        if start > stride:
            missing.append((start // stride, stride))
        stride = start * size
    if stride < world_size:
        missing.append((world_size // stride, stride))
    return tuple(reversed(missing))


def cut(digits: Digits, size: int) -> tuple[Digits, Digits] | None:
    """Split off the low part that counts to `size`: (high, low), or None where no digit can be cut there."""
    high, low = list(digits), []
    while size > 1:
        available, stride = high.pop()
        taken = min(size, available)
        if size % taken or available % taken:
            return None
        if taken < available:
            high.append((available // taken, stride * taken))
        low.append((taken, stride))
        size //= taken
    return tuple(high), tuple(reversed(low))
