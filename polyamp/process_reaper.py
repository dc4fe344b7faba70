"""Termination of a worker with all its descendants, and a small program that does it for a parent that was killed.

`polyamp.worker_processes` starts this file as a process. It reads from standard input which groups to kill and which
folder to remove, and does so at the end of the input. It uses only the standard library, so it starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK_VARIABLE = "POLYAMP_WORKER"
"""Environment variable that identifies the owner of a process; all descendants of a worker inherit it."""
_KILL_ATTEMPTS = 20


def kill_group(group: int, mark: str) -> None:
    """Kill a process group and, if the system shows them (Linux), processes of other groups with this mark."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    for _ in range(_KILL_ATTEMPTS):  # a process may be about to start another one
        found = processes_with_mark(mark)
        if not found:
            return
        for number in found:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)


def processes_with_mark(mark: str) -> list[int]:
    """Return the processes with a mark; none if the system does not show environments."""
    found = []
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def main() -> None:
    """Read lines: `+GROUP MARK` is killed at the end of the input, `-GROUP MARK` is gone, `=FOLDER` is removed."""
    workers: set[tuple[int, str]] = set()
    folder = ""
    for line in sys.stdin:
        what, rest = line[0], line[1:].rstrip("\n")
        if what == "=":
            folder = rest
        else:
            group, mark = rest.split()
            (workers.add if what == "+" else workers.discard)((int(group), mark))
    for group, mark in workers:
        kill_group(group, mark)
    if folder:
        import shutil

        time.sleep(0.2)  # processes that write into it are ending
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
