"""Selection of backends: those that a test is marked with, that the session selects, and that are not installed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from polyamp.contract import registry
from polyamp.errors import did_you_mean

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend

_SELECTION_KEY: Final = pytest.StashKey[tuple[str, ...]]()
MISSING_KEY: Final = pytest.StashKey[str]()
"""Stash key of an item: message about the missing framework, with what to do."""


class BackendChoice(str):
    """Name of a backend, such as "torch": value of the fixture `polyamp_backend`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name as a plain str."""
        return str(self)

    @property
    def backend(self) -> Backend:
        """The backend object; access imports its framework."""
        return registry.get(str(self))


def backend_choice(request: pytest.FixtureRequest) -> BackendChoice:
    """Return the value of the fixture `polyamp_backend`."""
    if not hasattr(request, "param"):
        raise pytest.UsageError(
            "polyamp_backend is chosen when tests are collected: name it as an argument of the test or of one of its "
            "fixtures. request.getfixturevalue('polyamp_backend') comes too late."
        )
    return BackendChoice(request.param)


def check_backend_names(names: Iterable[Any], where: str) -> tuple[str, ...]:
    """Return names of backends, each once.

    Raises:
        pytest.UsageError: a name is not that of a backend.
    """
    found = tuple(dict.fromkeys(names))
    known = registry.names()
    for name in found:
        if name not in known:
            entry = registry.entries().get(name) if isinstance(name, str) else None
            own = next((each for each, value in known.items() if entry is not None and entry.value == value), None)
            meant = f" Did you mean {own!r}?" if own else did_you_mean(str(name), known)
            raise pytest.UsageError(f"{where}: backends are {', '.join(sorted(known))}. Received: {name!r}.{meant}")
    return found


def selection(config: pytest.Config) -> tuple[str, ...]:
    """Return the backends that `--polyamp-backends` or the ini setting selects; empty means all."""
    if _SELECTION_KEY not in config.stash:
        given = config.getoption("polyamp_backends")
        where = "--polyamp-backends" if given else "polyamp_backends in the ini file"
        words = [name.strip() for text in given or config.getini("polyamp_backends") for name in text.split(",")]
        config.stash[_SELECTION_KEY] = check_backend_names(filter(None, words), where)
    return config.stash[_SELECTION_KEY]


def backend_names(node: pytest.Item, *, fixture: bool = False) -> list[str]:
    """Return the backends that a test is marked with.

    Args:
        node: the test.
        fixture: whether it uses `polyamp_backend`: without a mark it then runs for all selected backends.

    Raises:
        pytest.UsageError: the mark is empty or has an unknown backend; or there is neither a mark nor a selection.
    """
    mark = node.get_closest_marker("backends")
    where = f"{node.nodeid}: @pytest.mark.backends"
    if mark is not None:
        if mark.kwargs or not mark.args:
            raise pytest.UsageError(f'{where} takes names, as in @pytest.mark.backends("torch", "jax").')
        return list(check_backend_names(mark.args, where))
    chosen = selection(node.config)
    if fixture and not chosen:
        raise pytest.UsageError(
            f"{node.nodeid} asks for polyamp_backend and nothing says which: mark it, as in "
            '@pytest.mark.backends("torch", "jax"), or give --polyamp-backends (polyamp_backends in the ini file).'
        )
    return list(chosen) if fixture else []


def process_backend(item: pytest.Item) -> str | None:
    """Return the backend in whose process a test runs: its `polyamp_backend`, or the only backend of its mark."""
    spec = getattr(item, "callspec", None)
    if spec is not None and "polyamp_backend" in spec.params:
        return str(spec.params["polyamp_backend"])
    if item.get_closest_marker("backends") is None:
        return None
    names = backend_names(item)
    return names[0] if len(names) == 1 else None


def select_items(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of other backends, mark those of missing frameworks, and assign pytest-xdist groups.

    A test of several backends without `polyamp_backend` stays if two of them are selected. If it does not use
    `assert_parity`, one is enough.
    """
    chosen = selection(config)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        names = backend_names(item)
        home = process_backend(item)
        if home is not None:
            needed = [home]
            stays = not chosen or home in chosen
        else:
            needed = [name for name in names if not chosen or name in chosen]
            fewest = min(2, len(names)) if "assert_parity" in getattr(item, "fixturenames", ()) else min(1, len(names))
            stays = len(needed) >= fewest
        (kept if stays else left).append(item)
        if stays:
            _mark_missing_backends(item, needed)
            if home is not None and has_xdist_groups(config) and item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(xdist_group_name(home)))
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def has_xdist_groups(config: pytest.Config) -> bool:
    """Return whether pytest-xdist keeps groups of tests together."""
    return bool(config.getoption("loadgroup", False)) or config.getoption("dist", "no") == "loadgroup"


def xdist_group_name(backend: str) -> str:
    """Return the pytest-xdist group of a backend's tests."""
    return f"polyamp-{backend}"


def installation_problems(names: Sequence[str]) -> str:
    """Return which of these backends are not installed, and what to do; "" if all are."""
    return "; ".join(filter(None, map(_installation_problem, names)))


@functools.cache
def _installation_problem(name: str) -> str:
    status = registry.status(name)
    return "" if status.usable else f"{name} cannot be used here: {status.problem}"


def is_skip_missing_set(config: pytest.Config) -> bool:
    """Return whether tests of a framework that is not installed are skipped."""
    given = config.getoption("polyamp_skip_missing")
    return bool(given if given is not None else config.getini("polyamp_skip_missing"))


def _mark_missing_backends(item: pytest.Item, names: Sequence[str]) -> None:
    problem = installation_problems(names)
    if problem and is_skip_missing_set(item.config):
        item.add_marker(pytest.mark.skip(reason=problem))
    elif problem:
        item.stash[MISSING_KEY] = problem
