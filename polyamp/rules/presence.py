"""Whether the process of another rank still runs, and where this one's program is: for the roll call (S32)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_PROC: Final = Path("/proc")
_POLYAMP: Final = str(Path(__file__).resolve().parents[1])


def own() -> dict[str, Any]:
    """What tells others on the same machine whether this process still runs: its number, and when it began."""
    return {"host": _host(), "pid": os.getpid(), "start": _started(os.getpid())}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Whether a process of this machine ended; False for one of another machine, which cannot be asked.

    >>> is_gone(own()), is_gone({**own(), "start": "another time"}), is_gone({**own(), "host": "elsewhere"})
    (False, True, False)
    """
    if process["host"] != _host():
        return False
    if _PROC.joinpath("self", "stat").exists():
        return bool(_started(process["pid"]) != process["start"])
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def where(thread: int) -> str:
    """The line of the user's program that a thread is at, such as "train.py, line 31, in fetch"; "" if none is known.

    >>> import threading
    >>> where(threading.get_ident()).endswith(", in <module>")
    True
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, _POLYAMP, "<frozen")) and f"{os.sep}polyamp_" not in file:
            return f"{Path(file).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _host() -> str:
    """A name for this machine, and where processes are numbered by themselves (a container), for that."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(_PROC.joinpath("sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(_PROC.joinpath("self/ns/pid").readlink()))
    return " ".join(parts)


def _started(process: int) -> str:
    """When a process began, in the kernel's ticks; "" for one that is not there, or only waits to be counted."""
    try:
        fields = _PROC.joinpath(str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


_LIBRARIES: Final = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<string>"}
)
