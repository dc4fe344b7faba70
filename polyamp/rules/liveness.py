"""Liveness of other ranks' processes, and the current position of this process's program, for the roll call (S32)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_PROC_FOLDER: Final = Path("/proc")
_PACKAGE_FOLDER: Final = str(Path(__file__).resolve().parents[1])


def process_identity() -> dict[str, Any]:
    """Return the identity of this process for others on the same machine: its id and start time."""
    return {"host": _host_id(), "pid": os.getpid(), "start": _start_time(os.getpid())}


def is_process_gone(process: Mapping[str, Any]) -> bool:
    """Whether a process of this machine ended; False for a process of another machine.

    >>> (
    ...     is_process_gone(process_identity()),
    ...     is_process_gone({**process_identity(), "start": "another time"}),
    ...     is_process_gone({**process_identity(), "host": "elsewhere"}),
    ... )
    (False, True, False)
    """
    if process["host"] != _host_id():
        return False
    if _PROC_FOLDER.joinpath("self", "stat").exists():
        return bool(_start_time(process["pid"]) != process["start"])
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def user_code_location(thread: int) -> str:
    """Return the line of user code that a thread executes, such as "train.py, line 31, in fetch"; "" if unknown.

    >>> import threading
    >>> user_code_location(threading.get_ident()).endswith(", in <module>")
    True
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARY_FOLDERS, _PACKAGE_FOLDER, "<frozen")) and f"{os.sep}polyamp_" not in file:
            return f"{Path(file).name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _host_id() -> str:
    """Return an identifier of this machine, or of the container if it has its own process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(_PROC_FOLDER.joinpath("sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(_PROC_FOLDER.joinpath("self/ns/pid").readlink()))
    return " ".join(parts)


def _start_time(process: int) -> str:
    """Return when a process began, in kernel ticks; "" if it does not exist or is a zombie."""
    try:
        fields = _PROC_FOLDER.joinpath(str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


_LIBRARY_FOLDERS: Final = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<string>"}
)
