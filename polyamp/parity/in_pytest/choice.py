"""Which backends a test is for, which of them are chosen, and which are not installed. `polyamp.parity.plugin` asks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from polyamp.contract import registry
from polyamp.errors import did_you_mean

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend

_SELECTION: Final = pytest.StashKey[tuple[str, ...]]()
MISSING: Final = pytest.StashKey[str]()
"""On an item: the framework that it needs and that is not installed, with what to do."""


class Named(str):
    """The name of a backend, such as "torch": what the fixture `polyamp_backend` gives."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The same as a plain str."""
        return str(self)

    @property
    def backend(self) -> Backend:
        """The backend itself, whose framework is imported now."""
        return registry.get(str(self))


def named(request: pytest.FixtureRequest) -> Named:
    """The value of the fixture `polyamp_backend`."""
    if not hasattr(request, "param"):
        raise pytest.UsageError(
            "polyamp_backend is chosen when tests are collected: name it as an argument of the test or of one of its "
            "fixtures. request.getfixturevalue('polyamp_backend') comes too late."
        )
    return Named(request.param)


def checked(names: Iterable[Any], where: str) -> tuple[str, ...]:
    """Names of backends, each once.

    Raises:
        pytest.UsageError: one of them is none.
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
    """What `--polyamp-backends` or the ini setting chooses; empty where they choose nothing, which means all."""
    if _SELECTION not in config.stash:
        given = config.getoption("polyamp_backends")
        where = "--polyamp-backends" if given else "polyamp_backends in the ini file"
        words = [name.strip() for text in given or config.getini("polyamp_backends") for name in text.split(",")]
        config.stash[_SELECTION] = checked(filter(None, words), where)
    return config.stash[_SELECTION]


def names_of(node: pytest.Item, *, fixture: bool = False) -> list[str]:
    """The backends that a test is marked with.

    Args:
        node: the test.
        fixture: whether it asks for `polyamp_backend`: without a mark it is for all that the session chooses.

    Raises:
        pytest.UsageError: the mark names none, or what is no backend; or there is no mark and no choice.
    """
    mark = node.get_closest_marker("backends")
    where = f"{node.nodeid}: @pytest.mark.backends"
    if mark is not None:
        if mark.kwargs or not mark.args:
            raise pytest.UsageError(f'{where} takes names, as in @pytest.mark.backends("torch", "jax").')
        return list(checked(mark.args, where))
    chosen = selection(node.config)
    if fixture and not chosen:
        raise pytest.UsageError(
            f"{node.nodeid} asks for polyamp_backend and nothing says which: mark it, as in "
            '@pytest.mark.backends("torch", "jax"), or give --polyamp-backends (polyamp_backends in the ini file).'
        )
    return list(chosen) if fixture else []


def home_of(item: pytest.Item) -> str | None:
    """The backend in whose process a test belongs: its own `polyamp_backend`, or the only one it is marked with."""
    spec = getattr(item, "callspec", None)
    if spec is not None and "polyamp_backend" in spec.params:
        return str(spec.params["polyamp_backend"])
    if item.get_closest_marker("backends") is None:
        return None
    names = names_of(item)
    return names[0] if len(names) == 1 else None


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the session does not choose, and see to what is not installed and to groups of pytest-xdist.

    A test of several backends without `polyamp_backend` stays while two of them are chosen, or one where it does not
    compare (`assert_parity`).
    """
    chosen = selection(config)
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        names = names_of(item)
        home = home_of(item)
        if home is not None:
            needed = [home]
            stays = not chosen or home in chosen
        else:
            needed = [name for name in names if not chosen or name in chosen]
            fewest = min(2, len(names)) if "assert_parity" in getattr(item, "fixturenames", ()) else min(1, len(names))
            stays = len(needed) >= fewest
        (kept if stays else left).append(item)
        if stays:
            _see_to_missing(item, needed)
            if home is not None and grouped(config) and item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(group(home)))
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def grouped(config: pytest.Config) -> bool:
    """Whether pytest-xdist keeps groups of tests together."""
    return bool(config.getoption("loadgroup", False)) or config.getoption("dist", "no") == "loadgroup"


def group(backend: str) -> str:
    """The group of a backend's tests."""
    return f"polyamp-{backend}"


def missing(names: Sequence[str]) -> str:
    """What of these backends is not installed, and what to do; "" where all are."""
    return "; ".join(filter(None, map(_problem, names)))


@functools.cache
def _problem(name: str) -> str:
    status = registry.status(name)
    return "" if status.usable else f"{name} cannot be used here: {status.problem}"


def skips_missing(config: pytest.Config) -> bool:
    """Whether a framework that is not installed is a skip."""
    given = config.getoption("polyamp_skip_missing")
    return bool(given if given is not None else config.getini("polyamp_skip_missing"))


def _see_to_missing(item: pytest.Item, names: Sequence[str]) -> None:
    problem = missing(names)
    if problem and skips_missing(item.config):
        item.add_marker(pytest.mark.skip(reason=problem))
    elif problem:
        item.stash[MISSING] = problem
