"""What the README says works: its snippets, its demo command, and the install commands' extras."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = {
    name: re.search(rf"<!-- {name} command -->\n```bash\n(.*?)```", README, re.DOTALL).group(1).strip()
    for name in ("demo", "test")
}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.split("\n")[0])
def test_snippet_prints_what_its_comment_says(snippet):
    ran = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:-1] == re.findall(r"print\(.*\)  # (.*)", snippet)


def test_there_is_a_snippet_for_each_framework():
    assert ["import jax" in SNIPPETS[0], "import torch" in SNIPPETS[1]] == [True, True]


def test_commands_install_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in COMMANDS.values():
        (named,) = re.findall(r"pip install -q -e '\.\[(\w+)\]'", command)
        assert named in extras


def test_demo_command_runs():
    """From the part on that follows the installation."""
    program = COMMANDS["demo"].split(" && ")[-1]
    assert program == ".venv/bin/jaxpaged demo"
    command = [sys.executable, "-c", "from jaxpaged.cli import app; app()", *program.split()[1:]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every token" in ran.stdout
    assert "copied" in ran.stdout


def test_ci_runs_the_readme_test_command():
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text()
    assert COMMANDS["test"].split(" && ")[-1].startswith(".venv/bin/pytest")
