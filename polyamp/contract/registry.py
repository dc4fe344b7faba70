"""Registry of the backends, with the types of the contract: lookup, status, and `explain`.

`polyamp.lookup.backends` finds a backend; modules below the contract use it directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from polyamp.contract.backend import Backend, BackendInfo, HasOperationRules
from polyamp.contract.casting_report import CastingReport
from polyamp.errors import BackendError, UnsupportedError
from polyamp.lookup import backends as lookup
from polyamp.lookup import versions
from polyamp.lookup.backends import check_backend_argument, entries, install_command, names
from polyamp.recipe.policy import Policy

__all__ = [
    "BackendStatus",
    "backend_for",
    "backend_of_type",
    "backends",
    "check_backend_argument",
    "entries",
    "explain",
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


def backends(*, probe: bool = False) -> dict[str, BackendStatus]:
    """Return the status of every registered backend: whether it is usable, its version and devices, or why not.

    Args:
        probe: import each backend in a separate interpreter, which finds broken installations and lists devices.
            Without it nothing is imported.

    >>> backends()["reference"].usable
    True
    """
    return {name: _probe_status(name) if probe else status(name) for name in sorted(names())}


def explain(
    target: Any, policy: Policy | str, *inputs: Any, strict: bool = False, backend: str | None = None
) -> CastingReport:
    """Report the dtype of each operation of `target(*inputs)` under a policy, and the rule that decided it.

    Args:
        target: a function or a model, as for `policy.autocast`.
        policy: the policy, or its spelling.
        *inputs: the arguments; arrays of the framework, or its descriptions of array shapes.
        strict: raise for an operation that no op list names.
        backend: its name; by default that of the target, of the first input that is an array of a framework (NumPy
            does not decide), or of the framework that the function names.

    Raises:
        UnsupportedError: the backend has no casting reports; or with `strict`, an operation has no rule.
        TraceError: the target cannot be traced.

    Example:
        >>> import jax, jax.numpy as jnp, polyamp
        >>> layer = lambda w, x: jnp.exp(x @ w)
        >>> print(polyamp.explain(layer, polyamp.Policy("mixed_float16"), jnp.ones((2, 3)), jnp.ones((4, 2))))
        Policy(param='float32', compute='float16', output='float32') [mixed: float32 master weights]
        <BLANKLINE>
        module  operation    dtype    rule     count
        ------  -----------  -------  -------  -----
        .       dot_general  float16  compute      1
        .       exp          float32  float32      1
        <BLANKLINE>
        casts: 1 float16 -> float32, 2 float32 -> float16
        opaque: none
    """
    chosen = get(backend) if backend is not None else lookup.backend_of_call(target, inputs)
    if not isinstance(chosen, HasOperationRules):
        raise UnsupportedError(
            f"explain: the {chosen.name} backend of this version cannot say which dtype each operation runs in."
        )
    return chosen.explain(target, Policy.of(policy), *inputs, strict=strict)


def status(name: str) -> BackendStatus:
    """Return the status of one backend, without the others. Imports nothing."""
    import importlib.util

    root = name if name != "reference" else "numpy"
    if importlib.util.find_spec(entries()[name].module.partition(".")[0]) is None:
        return BackendStatus(name, False, None, (), f"its package is missing; {install_command(entries()[name])}")
    if importlib.util.find_spec(root) is None:
        return BackendStatus(name, False, None, (), f"{root} is not installed; {install_command(entries()[name])}")
    too_old = versions.outdated_requirement(entries()[name])
    if too_old is not None:
        return BackendStatus(
            name, False, versions.installed_version(root), (), f"{too_old} {install_command(entries()[name])}"
        )
    if root in sys.modules:
        try:
            return _loaded_status(name, get(name).info())
        except BackendError as error:
            return BackendStatus(name, False, None, (), str(error))
    return BackendStatus(name, True, versions.installed_version(root), (), None)


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
