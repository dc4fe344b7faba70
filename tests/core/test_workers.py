"""The guard of worker processes where the system has no process groups. What it does elsewhere is in
parity/test_ended.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from polyamp.worker_processes import Reaper


def test_without_process_groups_a_guard_starts_nothing_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "name", "nt")
        patched.setattr(subprocess, "Popen", lambda *command, **_: started.append(command))
        with Reaper(tmp_path) as guard:
            guard.watch_group(1, "mark")
            guard.unwatch_group(1, "mark")
    assert started == []
    assert tmp_path.is_dir()
