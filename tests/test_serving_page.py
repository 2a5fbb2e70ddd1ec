"""docs/serving.md: its code is one program, and prints what its comments say."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"


def test_the_page_runs_as_one_program(with_devices):
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=with_devices(8),
    )
    assert ran.returncode == 0, ran.stderr
    expected = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert len(expected) == 8
    assert ran.stdout.splitlines() == expected
