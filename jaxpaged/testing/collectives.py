"""Which collectives a compiled program holds."""

import re
from collections import Counter
from typing import Any

_KINDS = [
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
]
_OPERATION = re.compile(rf"= .*?\b({'|'.join(_KINDS)})(?:-start)?\(")


def collectives(compiled: Any) -> Counter[str]:
    """How many collectives of each kind the optimised HLO of a `jax.stages.Compiled` holds; a loop's count once."""
    found = (_OPERATION.search(line) for line in compiled.as_text().splitlines())
    return Counter(match[1] for match in found if match)
