"""Known defects and surprises of a framework, read from a file of its backend."""

from __future__ import annotations

from importlib import resources

import msgspec

from polyamp.doctor.measurements import KnownTrap


class TrapList(msgspec.Struct):
    """Content of a `known_traps.toml`."""

    traps: tuple[KnownTrap, ...]


def read_known_traps(module: str) -> tuple[KnownTrap, ...]:
    """Return the traps in the file beside a module that has its name: `known_traps.toml` for `....known_traps`."""
    package, _, name = module.rpartition(".")
    text = resources.files(package).joinpath(f"{name}.toml").read_bytes()
    return msgspec.toml.decode(text, type=TrapList, strict=True).traps
