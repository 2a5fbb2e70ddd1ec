"""What decode's functions hand to each other: references to memory, pieces of requests, and a running softmax."""

import enum
from typing import Any, NamedTuple


class Turn(enum.Enum):
    """Which pieces are computed. The interpreter, in which no CTA may read what another one wrote, takes two turns."""

    GOING_ON = enum.auto()
    BEGINNING = enum.auto()


class Operands(NamedTuple):
    """References to global memory; and if not all pieces are computed, which are."""

    requests: Any = None
    shares: Any = None
    kept_tiles: Any = None
    table: Any = None
    query: Any = None
    key: Any = None
    value: Any = None
    k_scale: Any = None
    v_scale: Any = None
    k_scales: Any = None
    v_scales: Any = None
    slopes: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    parts: Any = None
    flags: Any = None
    lse_by_request: Any = None
    turn: Turn | None = None


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any = None
    k: Any = None
    parts: Any = None
    v: Any = None
    k_scales: Any = None
    v_scales: Any = None
    queries: Any = None
    values: Any = None
    p: Any = None
    o: Any = None
    by_column: Any = None
    reductions: Any = None
    handed: Any = None
    handed_stats: Any = None
    handed_over: Any = None
    taken: Any = None
    q_full: Any = None
    q_empty: Any = None
    k_full: Any = None
    k_empty: Any = None
    v_full: Any = None
    v_empty: Any = None
    parts_there: Any = None


class Piece(NamedTuple):
    """The part of a request in a share: `count` tiles from `first_tile` on, a place in the list if there is one.

    If the request starts in the share, so many `others` go on with it, each in one of the shares after this one.
    """

    request: Any
    first_tile: Any
    count: Any
    starts_request: Any
    others: Any
    kv_len: Any
    q_start: Any
    q_len: Any
    damaged: Any


class Softmax(NamedTuple):
    """Running maximum of each row, sum for each of its places in a tile, and output, transposed, by pieces of the head.

    That threads don't add up their sums before a piece's end spares them a meeting in each step.
    """

    peak: Any
    total: Any
    acc: tuple[Any, ...]
