"""One of several processes under `jax.distributed`: compares every kind of parallelism with one device.

Usage: `one_process.py COORDINATOR NUM_PROCESSES PROCESS_ID`. Prints the differences of each kind.
"""

import json
import sys

import jax
from kinds import KINDS, compare


def main(coordinator: str, num_processes: str, process_id: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(num_processes), int(process_id))
    assert (jax.process_count(), len(jax.devices())) == (int(num_processes), 8)
    for kind in KINDS:
        print(json.dumps([kind, compare(kind, dtype="float32", per_head=("sinks",))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
