"""What type checkers say of a user's script: `typed_user.py` under `mypy --strict` and pyright."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("typed_user.py")
WRONG = {
    number: found[1]
    for number, line in enumerate(SCRIPT.read_text(encoding="utf-8").splitlines(), start=1)
    if (found := re.search(r"# wrong: (\w+)$", line))
}
"""Line -> the word that is wrong there."""

Findings = dict[int, str]


def mypy(folder: Path) -> Findings:
    """Line -> message."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={folder}", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    return {int(line): text for line, text in re.findall(r"typed_user\.py:(\d+): error: (.*)", done.stdout)}


def pyright(folder: Path) -> Findings:
    """Line -> message, of errors alone; pyright's own rules, not those that basedpyright adds."""
    settings = folder / "pyrightconfig.json"
    settings.write_text(json.dumps({"typeCheckingMode": "standard", "include": [str(SCRIPT)]}))
    command = [sys.executable, "-m", "basedpyright", "--project", str(settings), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--outputjson"], capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {
        item["range"]["start"]["line"] + 1: item["message"] + item.get("rule", "")
        for item in found
        if item["severity"] == "error"
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_checker_finds_what_is_wrong_in_a_users_script_and_nothing_else(
    checker: Callable[[Path], Findings], tmp_path: Path
) -> None:
    found = checker(tmp_path)
    assert len(WRONG) == 10
    assert found.keys() == WRONG.keys()
    assert [line for line, word in WRONG.items() if word not in found[line]] == []
