"""What the engines' classes must not cost: copies of caches, and compilations in every step."""

import re
from pathlib import Path

import pytest
import torch
from small_engine import SmallEngine
from test_flash import impl as flash_impl
from test_flash import metadata as flash_metadata
from test_flash import run as run_flash
from test_flex import built as flex_metadata
from test_flex import impl as flex_impl
from test_flex import run as run_flex
from test_sdpa import chunked as sdpa_metadata
from test_sdpa import impl as sdpa_impl
from test_sdpa import run as run_sdpa

import jaxpaged.backends.parts
from jaxpaged.testing.backend_doors import one_tensor
from jaxpaged.testing.cases import named_cases
from jaxpaged.testing.compilations import compilations
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare

CALLS = {
    "flash": lambda engine: run_flash(flash_impl(), engine, flash_metadata(engine, len(engine.lens))),
    "flex": lambda engine: run_flex(flex_impl(), engine, flex_metadata(engine)),
    "sdpa": lambda engine: run_sdpa(sdpa_impl(), engine, sdpa_metadata(engine, 0)),
}


def status(field):
    """A field of the process's memory in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE).group(1)) * 1024


def growth(call):
    """By how much the process's memory grows at most during a call."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def with_large_cache(engine):
    """The engine with blocks behind its own, all of them written to, so that they take memory."""
    more = torch.ones(2, 1 << 14, *engine.kv_cache.shape[2:])
    more[:, : engine.kv_cache.shape[1]] = engine.kv_cache
    engine.kv_cache, engine.before = more, None
    return engine


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' account of memory")
@pytest.mark.parametrize("name", CALLS)
def test_no_cache_is_copied(name):
    engine = with_large_cache(SmallEngine([5, 1], [20, 33], garbage=0))
    size = engine.kv_cache.nbytes
    CALLS[name](engine)  # what is compiled takes memory
    assert growth(lambda: CALLS[name](engine)) < size / 8
    assert growth(lambda: CALLS[name](engine) + engine.kv_cache.clone().sum()) > size * 0.9  # a copy is seen


@pytest.mark.parametrize("name", CALLS)
def test_steps_of_other_sizes_compile_nothing(name):
    CALLS[name](SmallEngine([20, 9, 1], [40, 9, 70], garbage=0))
    with compilations() as compiled:
        for lens in (([18, 5, 1], [60, 50, 4]), ([22, 1, 3, 1], [22, 33, 60, 2])):
            engine = SmallEngine(*lens, garbage=0)
            same = SmallEngine([20, 9, 1], [40, 9, 70], garbage=0).kv_cache.shape[1]
            engine.kv_cache = torch.nn.functional.pad(engine.kv_cache, (0, 0) * 3 + (0, same))[:, :same]
            engine.kv_cache = engine.kv_cache.contiguous()
            CALLS[name](engine)
    assert compiled.count == 0


@pytest.mark.parametrize("name", ["backend-flash", "backend-flex", "backend-sdpa"])
def test_a_door_finds_tokens_that_were_not_written(name, monkeypatch):
    (case,) = (c for c in named_cases() if c.name == "mixed")
    assert compare(one_tensor(case), name, DOORS[name]).ok
    monkeypatch.setattr(jaxpaged.backends.parts, "write_kv_", lambda *_: None)
    assert not compare(case, name, DOORS[name]).ok
