"""Backend of an object, a name or a function, found through entry points of the group `polyamp.backends`.

An entry's name is the root module of a framework's objects ("torch", "flax"); its value is a backend. Dispatch uses
the root modules along the MRO of an object's type, so recognising an object imports no framework. Backends are loaded
on demand. A framework that runs on several others, as Keras does, has an entry in the group `polyamp.backend_choices`
instead; its value is a function that returns the name of the backend. `polyamp.contract.registry` has the same
functions with the types of the contract.
"""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from polyamp import framework_detection
from polyamp.errors import BackendError, BackendNotInstalledError, ModelError, UnsupportedError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP: Final = "polyamp.backends"
CHOICE_GROUP: Final = "polyamp.backend_choices"
CONVERTER_GROUP: Final = "polyamp.converters"
"""Entries of frameworks that run on several others: root module -> the converter of their models on all of them."""
_BACKEND_ALIASES: Final = {"tf": "tensorflow", "pytorch": "torch", "pt": "torch"}
"""Other name of a framework -> backend name."""
_NEUTRAL_ROOTS: Final = ("polyamp", "numpy")
"""Roots whose models and arrays every explicitly named backend may accept."""
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)[^;]*?>=\s*([\d.]+)[^;]*(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?")


class BackendEntries(Mapping[str, "EntryPoint"]):
    """Entry name -> entry point of its backend. A name with a choice is resolved when its entry is read, not before.

    Args:
        own: entry name -> entry point of a backend.
        choices: root module of a framework that runs on several others -> entry point of the function that returns the
            name of the backend in use.
    """

    def __init__(self, own: Mapping[str, EntryPoint], choices: Mapping[str, EntryPoint]) -> None:
        self.own = own
        self.choices = choices

    def __getitem__(self, name: str) -> EntryPoint:
        return self.own[_chosen_name(name) if name in self.choices else name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.choices

    def __iter__(self) -> Iterator[str]:
        yield from (*self.own, *self.choices)

    def __len__(self) -> int:
        return len(self.own) + len(self.choices)


@functools.cache
def entries() -> BackendEntries:
    """Return entry name -> entry point of every registered backend.

    Raises:
        BackendError: two distributions claim one name.
    """
    own = _entries_of_group(ENTRY_POINT_GROUP)
    if not own:
        raise BackendError(
            "no backend is registered, so polyamp is imported from a source tree that is not installed. Run "
            "`pip install -e .` in it."
        )
    choices = _entries_of_group(CHOICE_GROUP)
    return BackendEntries(own, {name: entry for name, entry in choices.items() if name not in own})


def _entries_of_group(group: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise BackendError(
                f"two distributions claim the backend {entry.name!r}: {_distribution(other)} ({other.value}) and "
                f"{_distribution(entry)} ({entry.value}). Uninstall one of them."
            )
        found[entry.name] = entry
    return found


@functools.cache
def _chosen_name(name: str) -> str:
    """Return the name of the backend that a framework with a choice runs on. Imports that framework.

    Raises:
        BackendNotInstalledError: the framework, or the one that it runs on, is missing.
        UnsupportedError: polyamp has no backend for the one that it runs on.
        BackendError: its import fails otherwise.
    """
    entry = entries().choices[name]
    return str(_load_entry(name, entry, lambda: entry.load()()))


def converter_of_choice(model: Any) -> Any:
    """Return the converter of a model of a framework that runs on several others, the same on all of them; None for a
    model of another framework. Loads it if necessary."""
    known = _converter_entries()
    for base in type(model).__mro__:
        root = base.__module__.partition(".")[0]
        if root in known and root in sys.modules:
            return get_converter(root)
    return None


@functools.cache
def get_converter(name: str) -> Any:
    """Return the converter registered in `CONVERTER_GROUP` under a root module, and import it if necessary; None if
    there is none.

    Raises:
        BackendNotInstalledError: the framework, or the one that it runs on, is missing.
    """
    entry = _converter_entries().get(name)
    return None if entry is None else _load_entry(name, entry, entry.load)


@functools.cache
def _converter_entries() -> Mapping[str, EntryPoint]:
    return _entries_of_group(CONVERTER_GROUP)


@functools.cache
def get(name: str) -> Any:
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
    return _load_entry(name, entry, entry.load)


def _load_entry(name: str, entry: EntryPoint, load: Callable[[], Any]) -> Any:
    """Return the result of `load`, which loads an entry.

    Raises:
        BackendNotInstalledError: a framework is missing.
        UnsupportedError: raised by what is loaded.
        BackendError: a framework is too old, or the import fails otherwise.
    """
    too_old = outdated_requirement(entry)
    if too_old is not None:
        raise BackendError(f"backend {name!r} {too_old} Run: {install_command(entry)}")
    try:
        return load()
    except UnsupportedError:  # says itself what is not supported
        raise
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing and missing != entry.module.partition(".")[0]:
            raise BackendNotInstalledError(
                f"backend {name!r} needs {missing}, which is not installed. Run: "
                f"{install_command(entries().own.get(missing, entry))}"
            ) from error
        raise _import_failure(entry, error) from error
    except Exception as error:
        raise _import_failure(entry, error) from error


def backend_for(*objects: Any) -> Any:
    """Return the backend of the first recognised leaf among `objects` (states, models, arrays, or trees of them).

    Raises:
        BackendError: none of them belongs to a registered framework.
    """
    known = entries()
    for leaf in _leaves(objects):
        own = getattr(type(leaf), "backend", None)
        if own is not None and hasattr(leaf, "scale_state"):
            return leaf.backend
        root = _entry_root(type(leaf), known)
        if root is not None:
            return get(root)
    shown = ", ".join(f"{type(item).__module__}.{type(item).__qualname__}" for item in objects)
    raise BackendError(
        f"no backend recognises {shown}. Registered: {', '.join(sorted(names()))}. Pass a model or array of one of "
        "these frameworks, or name it: backend='jax'." + _function_hint(objects)
    )


def _function_hint(objects: tuple[Any, ...]) -> str:
    """Return "", or a sentence with a leading space if the only object is a function."""
    if len(objects) != 1 or not isinstance(objects[0], types.FunctionType):
        return ""
    return " In JAX a model that is a function comes with its parameters: (apply_fn, params)."


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


def backend_of_type(kind: type) -> Any:
    """Return the backend of arrays and models of this type; None if only the object determines it."""
    if issubclass(kind, Mapping | list | tuple) or hasattr(kind, "backend"):
        return None
    root = _entry_root(kind, entries())
    return None if root is None else get(root)


def names() -> dict[str, str]:
    """Return backend name -> the entry that loads it; one per backend, even if it has several root modules."""
    by_value: dict[str, list[str]] = {}
    for name, entry in entries().own.items():
        by_value.setdefault(entry.value, []).append(name)
    chosen = {}
    for value, aliases in by_value.items():
        module = value.partition(":")[0].replace(".", "_")
        own = [alias for alias in aliases if module.endswith(f"_{alias}")]
        chosen[(own or sorted(aliases))[0]] = value
    return chosen


def backend_of_call(target: Any, inputs: tuple[Any, ...]) -> Any:
    """Return the backend of a target, of its inputs, or of the framework that the target's code names."""
    chosen = backend_of_values((target, *inputs))
    if chosen is None and not callable(target):
        return backend_for(target)
    return chosen or backend_of_function(target)


def backend_of_values(values: Any) -> Any:
    """Return the backend of the first leaf that belongs to a framework; NumPy arrays do not decide."""
    known = entries()
    for leaf in _leaves(values):
        if any(framework_detection.has_framework(kind.__module__) for kind in type(leaf).__mro__):
            root = _entry_root(type(leaf), known)
            if root is not None or hasattr(leaf, "scale_state"):
                return backend_for(leaf)
    return None


def backend_of_function(target: Callable[..., Any]) -> Any:
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


def install_command(entry: EntryPoint) -> str:
    """Return the command that installs a backend's requirements.

    polyamp's own backends are extras of one distribution; a third-party backend is a separate distribution.
    """
    distribution = _distribution(entry)
    if distribution != "polyamp":
        return f"pip install --upgrade {distribution}"
    extra = next((name for name, value in names().items() if value == entry.value), entry.name)
    return f'pip install "polyamp[{extra}]"'


def check_framework(package: str, extra: str, *frameworks: str) -> None:
    """Raise if a framework that a backend's package imports is not installed. The packages call it at their import.

    Args:
        package: the import package, such as "polyamp_torch".
        extra: the extra of polyamp that installs the frameworks.
        frameworks: their root modules.

    Raises:
        ModuleNotFoundError: names the first that is missing, and the command that installs it.
    """
    from importlib.util import find_spec

    for framework in frameworks:
        if find_spec(framework) is None:
            raise ModuleNotFoundError(
                f'{package} needs {framework}, which is not installed. Run: pip install "polyamp[{extra}]"',
                name=framework,
            )


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def outdated_requirement(entry: EntryPoint) -> str | None:
    """Return the requirement and the installed version as a phrase without a subject; None if nothing is outdated.

    It checks the extra with the backend's name or, for a distribution that is only a backend, all requirements. Missing
    distributions are not outdated.
    """
    dist = entry.dist
    extra = entry.module.partition(".")[0].removeprefix("polyamp_")
    for requirement in (dist.requires if dist is not None else None) or ():
        asked = _REQUIREMENT.match(requirement)
        if asked is None or asked[3] != (extra if dist is not None and dist.name == "polyamp" else None):
            continue
        found = installed_version(asked[1])
        if found is not None and () < _version_numbers(found) < _version_numbers(
            asked[2]
        ):  # () stands for a build without a version
            return (
                f"needs {asked[1]} {asked[2]} or newer. Received: {asked[1]} {found}, and "
                f"{'.'.join(map(str, _version_numbers(found)[:2]))} is below {asked[2]}."
            )
    return None


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
    return {entry.module.partition(".")[0]: name for name, entry in reversed([*entries().own.items()])}


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _import_failure(entry: EntryPoint, error: BaseException) -> BackendError:
    return BackendError(
        f"backend {entry.name!r} (entry point {entry.value!r} of {_distribution(entry)}) fails to import: "
        f"{type(error).__name__}: {error}. Reinstall it: {install_command(entry)}"
    )


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 7, 1) of "2.7.1+cpu", (2, 8, 0) of "2.8.0a0"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
