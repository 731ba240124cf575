# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, unused-ignore, misc"
"""The kernel behind `tables`. To import this takes Triton, which comes with torch for CUDA on Linux."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["base", "count"])
def pack_tiles(base, addresses, facts, owners, count, TILE: tl.constexpr, BYTES: tl.constexpr):
    """Copy one tile of one tensor into a buffer at `base`, and make zero what room it leaves.

    `addresses` has one a tensor; `facts` four rows: where each goes in the buffer, its size, its room, and
    the number of its first tile; `owners` has a tensor a tile.
    """
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    start = (tile - tl.load(facts + 3 * count + owner)) * TILE
    left = tl.load(facts + count + owner) - start
    room = tl.minimum(tl.load(facts + 2 * count + owner) - start, TILE)
    there = base.to(tl.int64) + tl.load(facts + owner) + start
    here = tl.load(addresses + owner) + start
    done = left * 0
    if (there | here) % 16 == 0:
        lanes = tl.arange(0, TILE // 4)
        wide_there = tl.multiple_of(there.to(tl.pointer_type(tl.int32)), 16)
        wide_here = tl.multiple_of(here.to(tl.pointer_type(tl.int32)), 16)
        if left >= TILE:
            tl.store(wide_there + lanes, tl.load(wide_here + lanes))
            done += TILE
        else:
            words = tl.maximum(left, 0) // 4
            tl.store(wide_there + lanes, tl.load(wide_here + lanes, mask=lanes < words), mask=lanes < words)
            done += words * 4
    for at in range(done, room, BYTES):
        bytes_ = at + tl.arange(0, BYTES)
        found = tl.load(here.to(tl.pointer_type(tl.uint8)) + bytes_, mask=bytes_ < left, other=0)
        tl.store(there.to(tl.pointer_type(tl.uint8)) + bytes_, found, mask=bytes_ < room)
