"""What prefill's functions hand to each other: references to memory, and a running softmax."""

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """References to global memory."""

    work: Any = None
    counts: Any = None
    kept_steps: Any = None
    table: Any = None
    query: Any = None
    key: Any = None
    value: Any = None
    k_scale: Any = None
    v_scale: Any = None
    slopes: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    part_out: Any = None


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any = None
    o: Any = None
    lse: Any = None
    k: Any = None
    v: Any = None
    q_full: Any = None
    q_empty: Any = None
    k_full: Any = None
    k_empty: Any = None
    v_full: Any = None
    v_empty: Any = None
    narrow_k: Any = None
    narrow_v: Any = None
    narrow_k_full: Any = None
    narrow_k_empty: Any = None
    narrow_v_full: Any = None
    narrow_v_empty: Any = None
    turns: Any = None


class Softmax(NamedTuple):
    """Running maximum and sum of each row, and its output by pieces of the head."""

    peak: Any
    total: Any
    acc: tuple[Any, ...]
