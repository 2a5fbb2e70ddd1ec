"""Copies of the package under other names, for benchmarks of revisions side by side."""

import shutil
import subprocess
import sys
from pathlib import Path

import attention_revisions as revisions
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]


def copied(*arguments):
    return CliRunner().invoke(revisions.app, ["copy", *map(str, arguments)])


def test_copies_are_packages_of_their_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert copied(tmp_path, "test_one=.", "test_two=.").exit_code == 0
    import jaxpaged

    found = {}
    for name in ("jaxpaged_test_one", "jaxpaged_test_two"):
        with revisions.imported(name):
            from jaxpaged import KVCache, PagedBatch, paged_attention

            cache = KVCache.zeros(2, 4, 1, 8, "float32")
            batch = PagedBatch.create(jnp.zeros((1, 1), jnp.int32), [3])
            out = paged_attention(jnp.ones((1, 1, 8)), cache, batch, implementation="reference")
            found[name] = KVCache.__module__.split(".")[0], float(out.sum())
    assert found == {name: (name, 0.0) for name in found}
    assert sys.modules["jaxpaged"] is jaxpaged
    from jaxpaged import KVCache

    assert KVCache is jaxpaged.KVCache


def test_a_revision_is_as_git_has_it(tmp_path):
    if shutil.which("git") is None or subprocess.run(["git", "log", "-1"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("needs git and the repository")
    assert copied(tmp_path, "head=HEAD").exit_code == 0
    shown = subprocess.run(["git", "show", "HEAD:jaxpaged/__init__.py"], cwd=ROOT, capture_output=True).stdout
    copy = (tmp_path / "jaxpaged_head" / "__init__.py").read_bytes()
    assert copy == shown.replace(b"jaxpaged", b"jaxpaged_head")


@pytest.mark.parametrize("wrong", ["main", "=main", "a b=main", "x="])
def test_what_is_no_revision_is_refused(tmp_path, wrong):
    result = copied(tmp_path / "copies", wrong)
    assert result.exit_code == 2
    assert "NAME=REVISION" in result.output


def test_kernels_of_a_layer_are_added_up():
    timing = revisions.Timing(9, 9, {"sort": 1.0, "paged_decode_plan": 2.0, "paged_decode": 4.0}, {}, 3, 1.0, 1)
    assert revisions.kernels_of(timing).split() == ["4.0", "=", "4.0"]
