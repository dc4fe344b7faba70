"""What ends a worker with everything that it started; and a small program that does it for a parent that was killed.

`workers` calls `end`, and starts this file as a process: it reads from standard input what to end, and to remove, at
the end of its input. The standard library alone, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARK = "POLYAMP_WORKER"
"""Environment variable that says whose a process is: whatever a worker starts has it too."""
_TIMES = 20


def end(group: int, mark: str) -> None:
    """End a process group, and, where the system shows them (Linux), processes of other groups with this mark."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    for _ in range(_TIMES):  # one that is about to start another one
        found = marked(mark)
        if not found:
            return
        for number in found:
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """The processes with a mark; none where the system does not show environments."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def main() -> None:
    """Lines: `+GROUP MARK` is to be ended with the input, `-GROUP MARK` is no more; `=FOLDER` is to be removed."""
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
        end(group, mark)
    if folder:
        import shutil

        time.sleep(0.2)  # what writes into it is ending
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
