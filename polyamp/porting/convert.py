"""`save`: a model becomes a file; `convert`: a file of one framework becomes a file of another. Called by users and by
the command `polyamp port`.

A converted file's layout comes from an existing file of the target model, or from a function that builds the model;
without either the target is the source in the canonical layout, which `porting.open` reads in any environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyamp.contract import registry
from polyamp.errors import ArgumentError, PortError, did_you_mean
from polyamp.files import as_path
from polyamp.porting.files import files, formats
from polyamp.porting.layouts.canonical import canonical_of
from polyamp.porting.port import moved
from polyamp.porting.report import Moved, PortReport
from polyamp.porting.side import Side, export, side_of


def save(canonical_or_model: Any, path: str | os.PathLike[str], batch: Any = None) -> None:
    """Write a model in the canonical layout to one safetensors file, array by array, atomically.

    Args:
        canonical_or_model: what `export` or `open` returned, or a model, which is then exported.
        path: the file; its folder must exist. An older file there is replaced only once the new one is whole. Its
            permissions stay, and so does a symbolic link; partial files that killed saves of it left are removed.
        batch: inputs for `export`, of a model that shows more than its arrays only when it is called.

    Raises:
        PortError: an attribute is no JSON data, an array's dtype has no place in such a file, or a tie leads nowhere.
        ArgumentError: no path.
        OSError: the folder is missing, full or read-only; the older file is intact.

    Example:
        >>> import numpy as np, tempfile
        >>> from polyamp import porting
        >>> layer = porting.Layer("dense", {"kernel": porting.Lazy.of(np.ones((2, 3), "float32"))})
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> porting.save(porting.Canonical({"head": layer}, "torch"), path)
        >>> porting.open(path)
        Canonical(of torch: 1 layer, 6 values)
    """
    file = as_path(path, instead="porting.save(model, path) writes a model.")
    canonical = export(canonical_or_model, batch)
    files.write(canonical, file)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    into: str | None = None,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    source_format: str | None = None,
    target_format: str | None = None,
    dry_run: bool = False,
) -> PortReport:
    """Write a model's file as another framework, or polyamp, has it.

    Args:
        source: a model's file, of any form that `formats.inventory_of` takes.
        target: the file to be written; an older one is replaced at the end and whole.
        like: an existing file of the target model; the new one has its layout. It may be `target` itself.
        into: "package.module:build", a function that makes the target model, called without arguments.
        names: as for `polyamp.port`.
        strict: as for `polyamp.port`.
        source_format: whose file the source is, where it does not say: "canonical", or a backend's name.
        target_format: the same of the target.
        dry_run: do all but write.

    Returns:
        What was moved, and what the weights do not carry and is not alike.

    Raises:
        PortError: as `polyamp.port` raises it, or a file is damaged or of none of the known forms.
        ArgumentError: neither `like` nor `into` where the target needs one, or both; or `into` names no function.
        BackendNotInstalledError: a framework whose file it is is not installed.
        FileNotFoundError: there is no such file.
        OSError: the target cannot be written; an older one is as it was.
    """
    goal = Path(target)
    if like is not None and into is not None:
        raise ArgumentError("--like and --into both say what the target is. Give one of them.")
    chosen = target_format or (formats.framework_for(goal) if like is None else formats.CANONICAL)
    if like is None and into is None and chosen != formats.CANONICAL:
        raise ArgumentError(
            f"{goal} would be a file of {chosen}, and nothing says which model it is of. Give --like FILE, an existing "
            "file of the target model, or --into package.module:build, a function that makes it. A target that ends in "
            ".safetensors needs neither: it is written in the canonical layout."
        )
    found = formats.inventory_of(source, source_format)
    if like is not None:
        goes = formats.FileTarget(None if dry_run else goal, Path(like), target_format)
        return moved(Side(found, None, source), Side(goes.inventory(), goes, like), names, strict, None)[1]
    if into is None:
        if unknown := [layer.path for layer in found.layers if len(layer.forms) > 1]:
            raise PortError(
                f"{source} holds names and shapes, which do not say what {', '.join(unknown[:5])} is"
                f"{f' (and {len(unknown) - 5} more)' if len(unknown) > 5 else ''}. Give --into package.module:build, a "
                "function that makes the model: it says so."
            )
        canonical = canonical_of(found)
        if not dry_run:
            files.write(canonical, goal)
        return PortReport([Moved(path, path, layer.kind, "name") for path, layer in canonical.items()])
    side = side_of(_built(into), None, f"--into {into}")
    if chosen != formats.CANONICAL and not formats.same_backend(chosen, registry.backend_for(side.model).name):
        raise PortError(
            f"{goal} would be a file of {chosen}, and --into {into} makes a model of {side.inventory.framework}. "
            "Choose a target with the suffix of its files, or .safetensors for the canonical layout."
        )
    if dry_run:
        tried = side._replace(converter=formats.Tried(side.inventory))
        return moved(Side(found, None, source), tried, names, strict, None)[1]
    ported, report = moved(Side(found, None, source), side, names, strict, None)
    if chosen == formats.CANONICAL:
        save(ported, goal)
    else:
        formats.reader(chosen, goal).write_model(goal, ported)
    return report


def _built(into: str) -> Any:
    """The model that a function makes, named as package.module:build."""
    module, colon, name = into.partition(":")
    if not (module and colon and name):
        raise ArgumentError(f"--into takes package.module:build. Received: {into!r}.")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # entries are texts; a command's own folder is there, not this one
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # the same text
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that it needs itself
        raise ArgumentError(
            f"--into {into}: there is no module {error.name!r} here or among what is installed."
        ) from error
    if not callable(build := getattr(found, name, None)):
        known = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
        raise ArgumentError(f"--into {into}: {module} has no function {name!r}.{did_you_mean(name, known)}")
    model = build()
    if model is None:
        raise PortError(f"--into {into}: {name}() returned None, and should return the model.")
    return model
