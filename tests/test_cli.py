"""The command line: what it prints and how it exits."""

import json

import pytest
from typer.testing import CliRunner

from jaxpaged import doctor
from jaxpaged.cli import app
from jaxpaged.testing import report
from jaxpaged.testing.doors import DOORS, Door

RUNNER = CliRunner()


def test_doctor_reports_every_item_and_what_to_install():
    result = RUNNER.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    findings = {f["item"]: f for f in json.loads(result.stdout)}
    assert findings["paged attention, reference"]["level"] == "ok"
    assert findings["memory shared with PyTorch"]["level"] == "ok"
    assert findings["demo"]["level"] == "ok"
    assert findings["paged attention, GPU kernels"]["level"] == "missing"


def test_doctor_says_what_to_install_where_torch_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "torch" else "1.0")
    findings = {f.item: f for f in doctor.examine()}
    for item in ("PyTorch", "memory shared with PyTorch"):
        assert findings[item].level == "missing"
        assert findings[item].fix == 'pip install "jaxpaged[torch]"'
    assert findings["demo"].fix == 'pip install "jaxpaged[demo]"'


def test_doctor_table():
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "jaxpaged doctor" in result.stdout


def test_verify_gives_every_error_as_json():
    result = RUNNER.invoke(app, ["verify", "--json", "--case", "decode-window"])
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)["results"]
    assert {r["door"] for r in results} == set(DOORS)
    ran = [r for r in results if r["skipped"] is None]
    assert len(ran) >= 3
    assert all(0 < r["error"] <= r["tolerance"] for r in ran)


def test_verify_exits_with_1_when_one_is_out_of_tolerance(monkeypatch):
    good = DOORS["jax"]

    def off(inputs):
        out, lse = good.run(inputs)
        out[0, 0, 0] += 1e-4
        return out, lse

    monkeypatch.setitem(report.DOORS, "jax", Door(off, good.refuses))
    result = RUNNER.invoke(app, ["verify", "--door", "jax", "--case", "one-request"])
    assert result.exit_code == 1
    assert "0 of 1 within tolerance" in result.stdout


@pytest.mark.parametrize("arguments", [["--door", "cuda"], ["--case", "no such case"]])
def test_verify_refuses_what_it_does_not_know(arguments):
    assert RUNNER.invoke(app, ["verify", *arguments]).exit_code == 2


def test_demo_with_few_blocks_preempts_and_still_equals_dense_attention():
    arguments = ["demo", "--prefix", "import os\n\n\n", "--tokens", "24", "--blocks", "9", "--block-size", "8"]
    result = RUNNER.invoke(app, [*arguments, "def first(", "def second(", "class Third:\n"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("every token") == 3


def test_demo_on_the_jax_engine_shares_a_prefix_and_equals_dense_attention():
    arguments = ["demo", "--engine", "jax", "--prefix", "import os\nimport sys\n\n\n", "--tokens", "24"]
    result = RUNNER.invoke(app, [*arguments, "--blocks", "12", "def first(", "def second(", "class Third:\n"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("every token") == 3
    assert "in JAX" in result.stdout
    assert "shared: donated" in result.stdout


def test_demo_refuses_what_does_not_fit():
    result = RUNNER.invoke(app, ["demo", "--blocks", "2", "--tokens", "100", "x"])
    assert result.exit_code == 2
    assert "the cache has 2" in result.output
