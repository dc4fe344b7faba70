"""`save` writes a model to a file; `convert` converts a file of one framework to a file of another.

The layout of a converted file comes from an existing file of the target model, or from a function that builds the
model. Without either, the target is the source in the canonical layout, which `porting.open` reads in any environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyamp.errors import ArgumentError, PortError, describe_value, did_you_mean
from polyamp.files import as_path, missing_file_error
from polyamp.porting.files import canonical_file, file_formats
from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.matching.flatten_order import Rows
from polyamp.porting.model_side import ModelSide, export, make_model_side
from polyamp.porting.port import plan_values, transfer_model
from polyamp.porting.port_report import PortedLayer, PortReport
from polyamp.porting.progress import track_reads
from polyamp.porting.transfer_plan import PortOptions


def save(canonical_or_model: Any, path: str | os.PathLike[str], batch: Any = None) -> None:
    """Write a model in the canonical layout to one safetensors file, array by array, atomically.

    Args:
        canonical_or_model: what `export` or `open` returned, or a model, which is then exported.
        path: the file; its folder must exist. An older file there is replaced only once the new one is whole. Its
            permissions stay, and so does a symbolic link; partial files that killed saves of it left are removed.
        batch: inputs for `export`; needed if only a call of the model shows its layers.

    Raises:
        PortError: an attribute is no JSON data, the file format lacks an array's dtype, or a tied array does not exist.
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
    canonical_file.write(canonical, file)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    into: str | None = None,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    rows: Rows | None = None,
    forms: Mapping[str, str | Form] | None = None,
    source_format: str | None = None,
    target_format: str | None = None,
    dry_run: bool = False,
) -> PortReport:
    """Convert a model's file to the format of another framework or of polyamp.

    Args:
        source: a model's file, in any format that `file_formats.file_inventory` accepts.
        target: the file to be written; an older one is replaced atomically at the end.
        like: an existing file of the target model; the new one has its layout. It may be `target` itself.
        into: "package.module:build", a function that builds the target model, called without arguments.
        names: see `polyamp.port`.
        strict: see `polyamp.port`.
        rows: see `polyamp.port`.
        forms: see `polyamp.port`.
        source_format: format of the source if the file does not identify it: "canonical", or a backend's name.
        target_format: the same for the target.
        dry_run: do everything except writing.

    Returns:
        A report of the moved layers, and of differences that the weights do not carry.

    Raises:
        PortError: as for `polyamp.port`, or a file is damaged or of an unknown format.
        ArgumentError: neither `like` nor `into` where the target, `names`, `rows` or `forms` needs one, or both; or
            `into` names no function.
        BackendNotInstalledError: the framework of a file is not installed.
        FileNotFoundError: there is no such file.
        OSError: the target cannot be written; an older file is unchanged.
    """
    goal = Path(target)
    if not as_path(source).exists():  # before anything is said about the target
        raise missing_file_error(as_path(source))
    if like is not None and into is not None:
        raise ArgumentError("--like and --into both say what the target is. Give one of them.")
    chosen = target_format or (file_formats.framework_from_suffix(goal) if like is None else file_formats.CANONICAL)
    if like is None and into is None and chosen != file_formats.CANONICAL:
        raise ArgumentError(
            f"{goal} would be a file of {chosen}, and nothing says which model it is of. Give --like FILE, an existing "
            "file of the target model, or --into package.module:build, a function that makes it. A target that ends in "
            ".safetensors needs neither: it is written in the canonical layout."
        )
    for option, given in (("names", names), ("rows", rows), ("forms", forms)):
        if like is None and into is None and given:
            raise ArgumentError(
                f"--{option} says how the source corresponds to the target. Give --like FILE, an existing file of the "
                f"target model, or --into package.module:build. Received: {describe_value(given)} without a target "
                "model."
            )
    options = PortOptions(names, strict, rows, forms)
    found = file_formats.file_inventory(source, source_format)
    if like is not None:
        layout = file_formats.file_inventory(like, target_format)
        leaves, report = plan_values(found, layout, options)
        if not dry_run:
            with track_reads("filling the target", leaves) as shown:
                file_formats.write_like(goal, shown, Path(like), target_format)
        return report
    if into is None:
        if unknown := [layer.path for layer in found.layers if len(layer.forms) > 1]:
            raise PortError(
                f"{source} holds names and shapes, which do not say what {', '.join(unknown[:5])} is"
                f"{f' (and {len(unknown) - 5} more)' if len(unknown) > 5 else ''}. Give --into package.module:build, a "
                "function that makes the model: it says so."
            )
        canonical = to_canonical(found)
        if not dry_run:
            canonical_file.write(canonical, goal)
        return PortReport([PortedLayer(path, path, layer.kind, "name") for path, layer in canonical.items()])
    side = make_model_side(_build_model(into), None, f"--into {into}")
    converter: object = None if chosen == file_formats.CANONICAL else file_formats.file_converter(chosen, goal)
    if converter is not None and converter is not side.converter:
        raise PortError(
            f"{goal} would be a file of {chosen}, and --into {into} makes a model of {side.inventory.framework}. "
            "Choose a target with the suffix of its files, or .safetensors for the canonical layout."
        )
    if dry_run:
        return plan_values(found, side.inventory, options)[1]
    ported, report = transfer_model(ModelSide(found, None, source), side, options, None)
    if chosen == file_formats.CANONICAL:
        save(ported, goal)
    else:
        file_formats.file_converter(chosen, goal).write_model(goal, ported)
    return report


def _build_model(into: str) -> Any:
    """Return the model that a function, named as package.module:build, creates."""
    module, colon, name = into.partition(":")
    if not (module and colon and name):
        raise ArgumentError(f"--into takes package.module:build. Received: {into!r}.")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # entries are str; a command has its own folder there
        sys.path.insert(0, os.getcwd())  # noqa: PTH109  # as above
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that it imports is missing
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
