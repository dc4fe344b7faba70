"""Registry that finds the backend of an object or a name through entry points of the group `polyamp.backends`.

An entry's name is the root module of a framework's objects ("torch", "flax"); its value is a `Backend`. Dispatch uses
the root modules along the MRO of an object's type, so recognising an object imports no framework. Backends are loaded
on demand.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp.contract import framework_detection, versions
from polyamp.contract.backend import Backend, BackendInfo, HasNativeScaler, HasOperationRules
from polyamp.contract.casting_report import CastingReport
from polyamp.errors import BackendError, BackendNotInstalledError, ModelError, UnsupportedError, did_you_mean
from polyamp.recipe.policy import Policy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from polyamp.recipe.scaler import LossScaler

ENTRY_POINT_GROUP: Final = "polyamp.backends"
_BACKEND_ALIASES: Final = {"tf": "tensorflow", "pytorch": "torch", "pt": "torch"}
"""Other name of a framework -> backend name."""
_NEUTRAL_ROOTS: Final = ("polyamp", "numpy")
"""Roots whose models and arrays every explicitly named backend may accept."""
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


@functools.cache
def entries() -> Mapping[str, EntryPoint]:
    """Return entry name -> entry point of every registered backend.

    Raises:
        BackendError: two distributions claim one name.
    """
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise BackendError(
                f"two distributions claim the backend {entry.name!r}: {_distribution(other)} ({other.value}) and "
                f"{_distribution(entry)} ({entry.value}). Uninstall one of them."
            )
        found[entry.name] = entry
    if not found:
        raise BackendError(
            "no backend is registered, so polyamp is imported from a source tree that is not installed. Run "
            "`pip install -e .` in it."
        )
    return found


@functools.cache
def get(name: str) -> Backend:
    """Return the backend registered under `name`, and import it if necessary.

    Raises:
        BackendNotInstalledError: its framework is missing; contains the install command.
        BackendError: there is no such name, or its import fails.
    """
    known = entries()
    if name not in known:
        raise BackendError(
            f"backend must be one of {', '.join(sorted(names()))}. Received: {name!r}."
            + did_you_mean(_BACKEND_ALIASES.get(str(name).lower(), str(name)), known)
        )
    entry = known[name]
    too_old = versions.outdated_requirement(entry)
    if too_old is not None:
        raise BackendError(f"backend {name!r} {too_old} Run: {install_command(entry)}")
    try:
        backend: Backend = entry.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing and missing != entry.module.partition(".")[0]:
            raise BackendNotInstalledError(
                f"backend {name!r} needs {missing}, which is not installed. Run: {install_command(entry)}"
            ) from error
        raise _import_failure(entry, error) from error
    except Exception as error:
        raise _import_failure(entry, error) from error
    return backend


def backend_for(*objects: Any) -> Backend:
    """Return the backend of the first recognised leaf among `objects` (states, models, arrays, or trees of them).

    Raises:
        BackendError: none of them belongs to a registered framework.
    """
    known = entries()
    for leaf in _leaves(objects):
        own = getattr(type(leaf), "backend", None)
        if own is not None and hasattr(leaf, "scale_state"):
            backend: Backend = leaf.backend
            return backend
        root = _entry_root(type(leaf), known)
        if root is not None:
            return get(root)
    shown = ", ".join(f"{type(item).__module__}.{type(item).__qualname__}" for item in objects)
    raise BackendError(
        f"no backend recognises {shown}. Registered: {', '.join(sorted(names()))}. Pass a model or array of one of "
        "these frameworks, or name it: backend='jax'."
    )


def check_backend_argument(name: str, model: Any) -> None:
    """Raise if a model's framework contradicts the `backend=` argument, before that backend is imported.

    Raises:
        ModelError: names the model's framework.
    """
    known = entries()
    for leaf in _leaves([model]):
        root = _entry_root(type(leaf), known)
        if root is None or root in _NEUTRAL_ROOTS or name not in known:
            continue
        if known[root].value != known[name].value:
            own = next(n for n, value in names().items() if value == known[root].value)
            raise ModelError(
                f"model is of the {own} backend. Received: backend={name!r}. Drop backend=, which is for "
                "models that do "
                f"not show their framework, or write backend={own!r}."
            )
        return


def backend_of_type(kind: type) -> Backend | None:
    """Return the backend of arrays and models of this type; None if only the object determines it."""
    if issubclass(kind, Mapping | list | tuple) or hasattr(kind, "backend"):
        return None
    root = _entry_root(kind, entries())
    return None if root is None else get(root)


def names() -> dict[str, str]:
    """Return backend name -> the entry that loads it; one per backend, even if it has several root modules."""
    by_value: dict[str, list[str]] = {}
    for name, entry in entries().items():
        by_value.setdefault(entry.value, []).append(name)
    chosen = {}
    for value, aliases in by_value.items():
        module = value.partition(":")[0].replace(".", "_")
        own = [alias for alias in aliases if module.endswith(f"_{alias}")]
        chosen[(own or sorted(aliases))[0]] = value
    return chosen


def backends(*, probe: bool = False) -> dict[str, BackendStatus]:
    """Return the status of every registered backend: whether it is usable, its version and devices, or why not.

    Args:
        probe: import each backend in a separate interpreter, which finds broken installations and lists devices.
            Without it nothing is imported.

    >>> backends()["reference"].usable
    True
    """
    return {name: _probe_status(name) if probe else _static_status(name) for name in sorted(names())}


def status(name: str) -> BackendStatus:
    """Return the status of one backend, without the others. Imports nothing."""
    return _static_status(name)


def install_command(entry: EntryPoint) -> str:
    """Return the command that installs a backend's requirements.

    polyamp's own backends are extras of one distribution; a third-party backend is a separate distribution.
    """
    distribution = _distribution(entry)
    if distribution != "polyamp":
        return f"pip install --upgrade {distribution}"
    extra = next((name for name, value in names().items() if value == entry.value), entry.name)
    return f'pip install "polyamp[{extra}]"'


def check_supported(backend: Backend, policy: Policy) -> Backend:
    """Return the backend, if it supports the policy's settings other than dtypes.

    Raises:
        UnsupportedError: `op_rules`, on a backend without rules per operation.
    """
    if policy.op_rules and not isinstance(backend, HasOperationRules):
        raise UnsupportedError(
            f"the {backend.name} backend of this version cannot change the rule of one operation. Received: op_rules="
            f"{dict(policy.op_rules)}. Use policy.replace(op_rules={{}}), and overrides= to keep a module in float32."
        )
    return backend


def native_scaler(backend: str, scaler: LossScaler, **options: Any) -> Any:
    """Return the framework's own object for a scaler; see `LossScaler.native`.

    Raises:
        UnsupportedError: the backend has no such object.
    """
    found = get(backend)
    if not isinstance(found, HasNativeScaler):
        raise UnsupportedError(
            f"the {backend} backend of this version has no loss-scaling object of its own. Use scaler.scale, "
            "scaler.unscale and scaler.update, which take its arrays."
        )
    return found.native_scaler(scaler, **options)


def autocast(target: Any, policy: Policy, backend: str | None) -> Callable[..., Any]:
    """Implement `Policy.autocast`: wrap now for a model or a named backend, at the call for a plain function."""
    if backend is not None:
        return check_supported(get(backend), policy).autocast(target, policy)
    try:
        return check_supported(backend_for(target), policy).autocast(target, policy)
    except BackendNotInstalledError:
        raise
    except BackendError:
        if not callable(target):
            raise

    own = functools.cache(lambda: _backend_of_function(target))

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = _backend_of_values((*args, *kwargs.values())) or own()
        return check_supported(chosen, policy).autocast(target, policy)(*args, **kwargs)

    return call


def _backend_of_values(values: Any) -> Backend | None:
    """Return the backend of the first leaf that belongs to a framework; NumPy arrays do not decide."""
    known = entries()
    for leaf in _leaves(values):
        if any(framework_detection.has_framework(kind.__module__) for kind in type(leaf).__mro__):
            root = _entry_root(type(leaf), known)
            if root is not None or hasattr(leaf, "scale_state"):
                return backend_for(leaf)
    return None


def _backend_of_function(target: Callable[..., Any]) -> Backend:
    """Return the backend of the one framework that a function computes with.

    Raises:
        BackendError: no framework is found, or several.
    """
    known = entries()
    found = {known[root].value: root for root in reversed(framework_detection.detect_frameworks(target, known))}
    if len(found) == 1:
        return get(next(iter(found.values())))
    name = getattr(target, "__qualname__", type(target).__qualname__)
    seen = f"It has to do with {' and '.join(sorted(found.values()))}" if found else "No framework is seen in it"
    raise BackendError(
        f"cannot tell which framework {name} computes with: no argument is an array of one, and NumPy arrays go into "
        f"all of them. {seen}. Name it: policy.autocast(fn, backend='jax'), or polyamp.explain(..., backend='jax'). "
        f"Backends: {', '.join(sorted(names()))}; a function of NumPy alone is for 'reference'."
    )


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
    chosen = get(backend) if backend is not None else _backend_of_call(target, inputs)
    if not isinstance(chosen, HasOperationRules):
        raise UnsupportedError(
            f"explain: the {chosen.name} backend of this version cannot say which dtype each operation runs in."
        )
    return chosen.explain(target, Policy.of(policy), *inputs, strict=strict)


def _backend_of_call(target: Any, inputs: tuple[Any, ...]) -> Backend:
    """Return the backend of a target, of its inputs, or of the framework that the target's code names."""
    chosen = _backend_of_values((target, *inputs))
    if chosen is None and not callable(target):
        return backend_for(target)
    return chosen or _backend_of_function(target)


def _leaves(objects: Any) -> Iterator[Any]:
    for item in objects:
        if isinstance(item, Mapping):
            yield item
            yield from _leaves(item.values())
        elif isinstance(item, (list, tuple)):
            yield item
            yield from _leaves(item)
        else:
            yield item


def _entry_root(kind: type, known: Mapping[str, Any]) -> str | None:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in known and root in sys.modules and root != "reference":  # a user's module may have this name
            return root
        if root in _model_packages():
            return _model_packages()[root]
    return None


@functools.cache
def _model_packages() -> Mapping[str, str]:
    """Return root module of a backend's own classes, such as the models that `loss_fn` receives -> backend name."""
    return {entry.module.partition(".")[0]: name for name, entry in reversed([*entries().items()])}


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _import_failure(entry: EntryPoint, error: BaseException) -> BackendError:
    return BackendError(
        f"backend {entry.name!r} (entry point {entry.value!r} of {_distribution(entry)}) fails to import: "
        f"{type(error).__name__}: {error}. Reinstall it: {install_command(entry)}"
    )


def _static_status(name: str) -> BackendStatus:
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
