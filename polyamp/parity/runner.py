"""`run`: a comparison with one process per side, each with an interpreter of its own if need be."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp.errors import ArgumentError, PolyampError, RecipeError, described
from polyamp.parity.collected import report_of
from polyamp.parity.findings import encoded
from polyamp.parity.jobs import Event, Job, Loop
from polyamp.parity.named import Named, named, paths
from polyamp.parity.own_loop import OwnLoop
from polyamp.parity.processes import MODULE, Processes, Side
from polyamp.parity.report import Report
from polyamp.parity.stored import Store, Tree
from polyamp.recipe.recipe import Recipe

TIMEOUT: Final = 600.0
"""Seconds that a side may work."""
RANDOMNESS: Final = ("off", "shared")


def run(
    build: Mapping[str, Callable[[], Any]],
    *,
    data: Any,
    loss_fn: Any = None,
    recipe: Any = None,
    steps: int = 1,
    names: Mapping[str, Any] | None = None,
    inputs: Any = None,
    randomness: str = "off",
    interpreters: Mapping[str, str | Path] | None = None,
    timeout: float = TIMEOUT,
    out: str | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    options: Any = None,
    at_once: int = 1,
) -> Report:
    """`polyamp.compare` with one process per side, for frameworks or versions that cannot share one.

    The first side is compared with each other one: it gives them its weights, and all train on the same batches. A
    side that fails, hangs or is killed is a line of the report's `failures`; what it did until then is compared.

    Args:
        build: label -> function that makes the model; the first label is the first side. Functions are called in the
            side's own process, which imports them by module and name: import the framework inside of them, and keep
            them at the top level of a file. Labels are free ("torch", "torch compiled").
        data: what `loss_fn` is given: a batch of NumPy arrays, a list of batches (step k gets number k modulo their
            number), or a function of the step's number (from 0), which every process calls and which must give the
            same arrays in each. Images are given as the first side has them; `polyamp.porting.Batch(a, b)` gives the
            first and the others their own.
        loss_fn: `loss_fn(model, batch) -> loss`, for all, or for each: by label, or a tuple in the order of `build`.
            None: outputs against fixed random numbers.
        recipe: what to train with, for all or for each: a recipe; a function of the model that makes one, for a
            framework's own optimizer; or an `OwnLoop`. None: one forward and backward pass in float32.
        steps: training steps.
        names: as for `polyamp.port`, where names do not tell which layer is which; by label where sides need others.
        inputs: what the models themselves take, or a function that returns it, for all or by label, where layers are
            known by their names alone (linen, haiku, functions).
        randomness: "off": dropout passes on what it gets. "shared": all sides drop the same elements.
        interpreters: label -> Python of another environment, with the same version of polyamp.
        timeout: seconds that a side may work for; waiting for the others does not count.
        out: folder that gets the report (also if this is interrupted), and of each side what it printed and its trace.
        on_event: called with what happens (`polyamp.parity.jobs.Event`), in this thread.
        options: `{"init": {...}, "step": {...}}`, plain data that `polyamp.init` and `train_step` are given, for all or
            for each.
        at_once: how many sides may work at a time. With more than one they share memory and cores.

    Returns:
        The report, whatever became of the sides: `report.agrees`, `report.first`, `report.failures`, `print(report)`.

    Raises:
        ArgumentError, RecipeError: an argument that cannot be.
        KeyboardInterrupt: Ctrl-C. No process is left; with `out` the report of what was collected is there, and a note
            on the exception says so.

    Example::

        # models.py
        def in_torch():
            import torch
            return torch.nn.Linear(4, 2)

        def in_keras():
            import keras
            return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

        if __name__ == "__main__":
            x = numpy.ones((8, 4), "float32")
            print(polyamp.parity.run({"torch": in_torch, "keras": in_keras}, data=x))

    A function that no other process can import is refused:

        >>> run({"torch": lambda: 1, "keras": lambda: 2}, data=1)
        Traceback (most recent call last):
          ...
        polyamp.errors.ArgumentError: build['torch'] must be a function that another process can import: it is called in
        one. Received: a lambda. Write a function with a name, at the top level of a file, and give that.
    """
    began = time.perf_counter()
    _check(build, steps, randomness, timeout, at_once)
    kept = None if out is None else _writable(Path(out))
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as scratch:
        jobs = _jobs(
            Path(scratch), kept, build, data, loss_fn, recipe, steps, names, inputs, randomness, options
        )  # fmt: skip
        pythons = _pythons(interpreters or {}, list(build))
        sides = [Side(job, pythons[job.side], Path(job.traces) / "log.txt") for job in jobs]
        processes = Processes(sides, timeout, at_once, on_event or _nothing)

        def report() -> Report:
            found = report_of(sides, processes.phases, steps, randomness, time.perf_counter() - began)
            if kept is not None:
                (kept / "report.json").write_bytes(encoded(found))
            return found

        try:
            processes.run()
        except BaseException as error:
            try:
                report()
                if kept is not None:
                    for old in ("report.html", "report.png"):
                        (kept / old).unlink(missing_ok=True)  # of an earlier run: drawing takes too long for now
                error.add_note(_left(kept))
            except Exception as another:  # noqa: BLE001  # what interrupted the run is what is raised
                error.add_note(f"polyamp.parity.run was interrupted, and its report could not be written: {another}")
            raise
        found = report()
    if kept is not None:
        _save(found, kept)
    return found


def _check(build: Any, steps: Any, randomness: Any, timeout: Any, at_once: Any) -> None:
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == MODULE:
        raise ArgumentError(
            "parity.run is called where a worker imports the file of a function, so each worker would start more of "
            'them. Put the call below if __name__ == "__main__": or into another file.'
        )
    if not isinstance(build, Mapping) or not all(isinstance(label, str) and label for label in build):
        raise ArgumentError(
            "build must be a dict of label -> function that makes the model, such as {'torch': make_torch, 'jax': "
            f"make_jax}}. Received: {described(build)}."
        )
    if len(build) < 2:
        raise ArgumentError(f"build must name two sides or more. Received: {', '.join(build) or 'none'}.")
    for name, value in (("steps", steps), ("at_once", at_once)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} must be a whole number of at least 1. Received: {name}={value!r}.")
    if randomness not in RANDOMNESS:
        raise ArgumentError(f"randomness must be 'off' or 'shared'. Received: randomness={randomness!r}.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentError(f"timeout must be a number of seconds above 0. Received: timeout={timeout!r}.")


def _jobs(
    scratch: Path,
    kept: Path | None,
    build: Mapping[str, Any],
    data: Any,
    loss_fn: Any,
    recipe: Any,
    steps: int,
    names: Mapping[str, Any] | None,
    inputs: Any,
    randomness: str,
    options: Any,
) -> list[Job]:
    """A job for each side; writes the arrays that they are given."""
    labels = list(build)
    found = paths()
    losses, recipes, given_inputs, given_options = (
        _by_label(value, name, labels)
        for name, value in (("loss_fn", loss_fn), ("recipe", recipe), ("inputs", inputs), ("options", options))
    )
    given_names = _names(names, labels)
    with Store(scratch / "data.bin") as store:
        batches = _data(data, store)
        inside = {label: _inputs(given_inputs[label], store) for label in labels}
    return [
        Job(
            side=label,
            number=number,
            folder=str(scratch),
            traces=str(_folder(scratch if kept is None else kept, number, label)),
            paths=found,
            build=named(build[label], f"build[{label!r}]"),
            loss_fn=None if losses[label] is None else named(losses[label], "loss_fn"),
            recipe=_recipe(recipes[label]),
            data=batches,
            inputs=inside[label],
            steps=steps,
            names=given_names[label],
            randomness=randomness,
            options=_options(options_ if (options_ := given_options[label]) is not None else {}),
        )
        for number, label in enumerate(labels)
    ]


def _by_label(value: Any, name: str, labels: Sequence[str]) -> dict[str, Any]:
    """Label -> what was given for it, or for all."""
    if isinstance(value, Mapping) and set(value) & set(labels):
        if set(value) != set(labels):
            raise ArgumentError(
                f"{name} must be given for all sides or for each ({', '.join(labels)}). Received: "
                f"{', '.join(map(str, value))}."
            )
        return dict(value)
    if isinstance(value, tuple) and name != "inputs":  # inputs in a tuple are positional
        if len(value) != len(labels):
            raise ArgumentError(
                f"{name} must be given for all sides or for each ({', '.join(labels)}). Received: a tuple of "
                f"{len(value)}."
            )
        return dict(zip(labels, value, strict=True))
    return dict.fromkeys(labels, value)


def _names(names: Any, labels: Sequence[str]) -> dict[str, dict[str, str] | None]:
    """Label -> the renamings of the first side's paths for it."""
    if names is None or not isinstance(names, Mapping) or not all(isinstance(each, Mapping) for each in names.values()):
        return dict.fromkeys(labels, None if names is None else dict(names))
    surplus = sorted(set(names) - set(labels[1:]))
    if surplus:
        raise ArgumentError(
            f"names must be for the sides after the first ({', '.join(labels[1:])}), where each has its own. "
            f"Received: {', '.join(surplus)}."
        )
    return {label: dict(names[label]) if label in names else None for label in labels}


def _data(data: Any, store: Store) -> Named | list[Tree]:
    if callable(data):
        return named(data, "data")
    if isinstance(data, list):
        if not data:
            raise ArgumentError("data must hold at least one batch. Received: an empty list.")
        return [store.put_tree(batch, "data") for batch in data]
    return [store.put_tree(data, "data")]


def _inputs(inputs: Any, store: Store) -> Named | Tree | None:
    if inputs is None:
        return None
    return named(inputs, "inputs") if callable(inputs) else store.put_tree(inputs, "inputs")


def _recipe(recipe: Any) -> str | Named | Loop | None:
    if recipe is None:
        return None
    if isinstance(recipe, OwnLoop):
        begin, step = named(recipe.begin, "recipe.begin"), named(recipe.step, "recipe.step")
        return Loop(begin=begin, step=step, looked_at=recipe.recipe.to_json())
    if not isinstance(recipe, Recipe):
        if callable(recipe):
            return named(recipe, "recipe")
        raise RecipeError(
            "recipe must be a polyamp.Recipe, a function of the model that returns one, a polyamp.parity.OwnLoop, or "
            f"None for a forward and backward pass in float32. Received: {described(recipe)}."
        )
    try:
        return recipe.to_json()
    except PolyampError as error:
        raise RecipeError(
            f"recipe goes to other processes as JSON, and {error} Or write a function, def recipe(model): return "
            "polyamp.Recipe(...), and give that: each process calls it with its own model."
        ) from error


def _options(options: Any) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(msgspec.json.encode(options), type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, TypeError, NotImplementedError) as error:  # msgspec's, of a type it cannot encode
        raise ArgumentError(
            'options must be plain data such as {"step": {"compile": True}}: what polyamp.init and train_step are '
            f"given. Received: {described(options)} ({error})."
        ) from error


def _folder(root: Path, number: int, label: str) -> Path:
    """Where a side's trace and what it printed go; traces of an earlier run are removed."""
    folder = root / "sides" / f"{number}-{re.sub('[^A-Za-z0-9._-]+', '-', label)}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.trace"):
        old.unlink()
    return folder


def _pythons(interpreters: Mapping[str, str | Path], labels: Sequence[str]) -> dict[str, str]:
    surplus = sorted(set(interpreters) - set(labels))
    if surplus:
        raise ArgumentError(
            f"interpreters must be for labels of build ({', '.join(labels)}). Received: {', '.join(surplus)}."
        )
    given = {label: str(Path(path).expanduser()) for label, path in interpreters.items()}
    return {label: shutil.which(given[label]) or given[label] if label in given else sys.executable for label in labels}


def _writable(out: Path) -> Path:
    """Find out before minutes of training whether the report can be written."""
    from polyamp.files import write_atomically

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "report.json", b"", replace=False)
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written to. Received: {str(out)!r}: {error}.") from error
    return out.absolute()


def _save(report: Report, kept: Path) -> None:
    """The page and the picture; a report that cannot be drawn is returned all the same, and its data is written."""
    try:
        report.save(kept)
    except Exception as error:  # noqa: BLE001  # whatever it is, it must not take minutes of training with it
        warnings.warn(str(error), UserWarning, stacklevel=3)


def _left(kept: Path | None) -> str:
    if kept is None:
        return "polyamp.parity.run was interrupted; out= names a folder that keeps what was collected until then."
    return f"polyamp.parity.run was interrupted; what was collected until then: {kept / 'report.json'}"


def _nothing(event: Event) -> None:
    """Nobody wants to hear events."""
