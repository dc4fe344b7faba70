"""Registry of the backends, with the types of the contract: lookup and status.

`polyamp.backend_lookup` finds a backend; modules below the contract use it directly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from polyamp import backend_lookup as lookup
from polyamp.backend_lookup import check_backend_argument, entries, install_command, names
from polyamp.contract.backend import Backend, BackendInfo
from polyamp.errors import BackendError

__all__ = [
    "BackendStatus",
    "backend_for",
    "backend_of",
    "backend_of_type",
    "backends",
    "check_backend_argument",
    "entries",
    "get",
    "install_command",
    "names",
    "status",
]

get: Final[Callable[[str], Backend]] = lookup.get
backend_for: Final[Callable[..., Backend]] = lookup.backend_for
backend_of_type: Final[Callable[[type], Backend | None]] = lookup.backend_of_type
_FOUND_PREFIX: Final = "polyamp found: "
"""Prefix of the line on which a probed backend reports its result."""
_loaded_backends: dict[str, Backend] = {}
"""Backends used so far, by name."""
_names_by_type: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""Type of an array or a model -> the name of its backend."""


class BackendStatus(NamedTuple):
    """One entry of `polyamp.backends()`.

    Attributes:
        name: the backend's name.
        usable: True if its framework is installed and, with `probe`, imports.
        version: the framework's version, or None.
        devices: devices, if the framework is already imported or was probed; else empty.
        problem: why it is not usable, with a fix; None if it is.
    """

    name: str
    usable: bool
    version: str | None
    devices: tuple[str, ...]
    problem: str | None


def backend_of(target: Any) -> Backend:
    """Return the backend of an array, a model or a state, in eager and in compiled code.

    torch.compile cannot trace the search. So it runs `_backend_name` while tracing and treats the name as a constant,
    which indexes a dictionary of loaded backends.

    Raises:
        BackendError: no backend recognises it.
    """
    name = _backend_name(type(target))
    return backend_for(target) if name is None else _loaded_backends[name]


def backends(*, probe: bool = False) -> dict[str, BackendStatus]:
    """Return the status of every registered backend: whether it is usable, its version and devices, or why not.

    Args:
        probe: import each backend in a separate interpreter, which finds broken installations and lists devices.
            Without it nothing is imported.

    >>> backends()["reference"].usable
    True
    """
    return {name: _probe_status(name) if probe else status(name) for name in sorted(names())}


def status(name: str) -> BackendStatus:
    """Return the status of one backend, without the others. Imports nothing."""
    import importlib.util

    root = name if name != "reference" else "numpy"
    if importlib.util.find_spec(entries()[name].module.partition(".")[0]) is None:
        return BackendStatus(name, False, None, (), f"its package is missing; {install_command(entries()[name])}")
    if importlib.util.find_spec(root) is None:
        return BackendStatus(name, False, None, (), f"{root} is not installed; {install_command(entries()[name])}")
    too_old = lookup.outdated_requirement(entries()[name])
    if too_old is not None:
        return BackendStatus(
            name, False, lookup.installed_version(root), (), f"{too_old} {install_command(entries()[name])}"
        )
    if root in sys.modules:
        try:
            return _loaded_status(name, get(name).info())
        except BackendError as error:
            return BackendStatus(name, False, None, (), str(error))
    return BackendStatus(name, True, lookup.installed_version(root), (), None)


def _loaded_status(name: str, info: BackendInfo) -> BackendStatus:
    return BackendStatus(name, True, info.version, info.devices, None)


def _probe_status(name: str) -> BackendStatus:
    import json
    import re
    import subprocess

    code = f"import json, polyamp.contract.registry as r; i = r.get({name!r}).info(); "
    code += f"print({chr(10) + _FOUND_PREFIX!r} + json.dumps(list(i)))"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return BackendStatus(name, False, None, (), "its import did not end within 300 s")
    found = [
        line for line in done.stdout.splitlines() if line.startswith(_FOUND_PREFIX)
    ]  # the framework may print other lines
    if done.returncode == 0 and found:
        framework, version, devices = json.loads(found[-1].removeprefix(_FOUND_PREFIX))
        return _loaded_status(name, BackendInfo(framework, version, tuple(devices)))
    lines = done.stderr.strip().splitlines() or [f"the interpreter ended with status {done.returncode}"]
    problem = re.sub(r"^polyamp\.errors\.\w+: ", "", lines[-1])  # drop the class of the exception
    return BackendStatus(name, False, None, (), problem)


def _backend_name(kind: type) -> str | None:
    """Return the backend's name in `_loaded_backends`; None if the type does not determine it."""
    known = _names_by_type.get(kind)
    if known is not None:
        return known
    backend = backend_of_type(kind)
    if backend is None:
        return None
    name = _names_by_type[kind] = _loaded_backends.setdefault(backend.name, backend).name
    return name


# What torch.compiler.assume_constant_result sets, without the import of torch. Other frameworks ignore it.
_backend_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute
