"""`run`: a comparison with one process per side, each with its own interpreter if needed."""

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

from polyamp.errors import ArgumentError, PolyampError, RecipeError, describe_value
from polyamp.parity.execution.batch_checks import check_batches, check_count, check_randomness
from polyamp.parity.execution.function_ref import FunctionRef, import_paths, make_function_ref
from polyamp.parity.execution.memory_mapped_arrays import ArrayStore, BatchTree
from polyamp.parity.execution.operation_processes import record_operations
from polyamp.parity.execution.report_builder import build_report
from polyamp.parity.execution.worker_messages import OwnLoopSpec, ParityEvent, SideJob
from polyamp.parity.execution.worker_pool import WORKER_MODULE, SideProcess, WorkerPool
from polyamp.parity.report.report import Report
from polyamp.parity.report_data import encode_report
from polyamp.parity.trainers import OwnLoop
from polyamp.porting.matching.flatten_order import Rows
from polyamp.recipe.recipe import Recipe

TIMEOUT: Final = 600.0
"""Default time limit of a side's work, in seconds."""


def run(
    build: Mapping[str, Callable[[], Any]],
    *,
    data: Any,
    loss_fn: Any = None,
    recipe: Any = None,
    steps: int = 1,
    names: Mapping[str, Any] | None = None,
    rows: Rows | None = None,
    inputs: Any = None,
    randomness: str = "off",
    interpreters: Mapping[str, str | Path] | None = None,
    timeout: float = TIMEOUT,
    out: str | Path | None = None,
    on_event: Callable[[ParityEvent], None] | None = None,
    options: Any = None,
    at_once: int = 1,
) -> Report:
    """Run `polyamp.compare` with one process per side, for frameworks or versions that cannot share a process.

    The first side is compared with each other one: all start from its weights and train on the same batches. A side
    that fails, hangs or is killed is listed in the report's `failures`; its results until then are compared.

    Args:
        build: label -> function that makes the model; the first label is the first side. Each function is called in
            the side's process, which imports it by module and name: import the framework inside the function, and
            define the function at the top level of a file. Labels are free ("torch", "torch compiled").
        data: argument of `loss_fn`: a batch of NumPy arrays; a list of batches (step k gets number k modulo their
            number); or a function of the step number (from 0), which every process calls and which must return the
            same arrays in each. Images are in the layout of the first side; `polyamp.porting.Batch(a, b)` gives the
            first and the others their own.
        loss_fn: `loss_fn(model, batch) -> loss`, for all, or for each: by label, or a tuple in the order of `build`.
            None: compares the outputs with fixed random numbers.
        recipe: training recipe, for all or for each: a recipe; a function of the model that makes one, for a
            framework's own optimizer; or an `OwnLoop`. None: one forward and backward pass in float32.
        steps: number of training steps.
        names: as for `polyamp.port`, where layers cannot be matched by name; by label where sides differ.
        rows: as for `polyamp.port`, for every side after the first, where the first batch does not show whether a dense
            layer takes flattened channels; a note of the report says where that is.
        inputs: inputs of the models themselves, or a function that returns them, for all or by label, where layers are
            identified by name only (linen, haiku, functions).
        randomness: "off": dropout passes its input through. "shared": all sides drop the same elements.
        interpreters: label -> Python of another environment, with the same version of polyamp.
        timeout: time limit of a side's work in seconds; waiting for the others does not count.
        out: folder for the report (also if the run is interrupted), and for each side's output and trace.
        on_event: called with every event (`polyamp.parity.execution.worker_messages.ParityEvent`), in this thread.
        options: `{"init": {...}, "step": {...}}`, plain data for `polyamp.init` and `train_step`, for all or for each.
        at_once: number of sides that may work at a time. With more than one they share memory and cores.

    Returns:
        The report, even if sides fail: `report.agrees`, `report.first`, `report.failures`, `print(report)`.

    Raises:
        ArgumentError, RecipeError: an argument is invalid.
        KeyboardInterrupt: Ctrl-C. All processes are ended; with `out` the report of the results so far is written, and
            a note on the exception says so.

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
    _check_arguments(build, steps, randomness, timeout, at_once)
    out_folder = None if out is None else _check_writable(Path(out))
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as scratch:
        jobs = _make_jobs(
            Path(scratch), out_folder, build, data, loss_fn, recipe, steps, names, rows, inputs, randomness, options
        )  # fmt: skip
        pythons = _interpreters_by_label(interpreters or {}, list(build))
        sides = [
            SideProcess(label=job.side, folder=Path(job.traces), job=job, python=pythons[job.side]) for job in jobs
        ]
        pool = WorkerPool(sides, Path(scratch), timeout, on_event or _ignore_event, at_once=at_once)

        def report() -> Report:
            found = build_report(sides, pool.phases, steps, randomness, began)
            _write_data(found, out_folder)
            return found

        try:
            pool.run()
            found = record_operations(report(), sides, jobs, pool.phases, Path(scratch), timeout)
        except BaseException as error:
            try:
                report()
                if out_folder is not None:
                    for old in ("report.html", "report.png"):
                        (out_folder / old).unlink(
                            missing_ok=True
                        )  # from an earlier run: there is no time to draw new ones
                error.add_note(_interrupt_note(out_folder))
            except Exception as another:  # noqa: BLE001  # the interruption itself is raised
                error.add_note(f"polyamp.parity.run was interrupted, and its report could not be written: {another}")
            raise
        _write_data(found, out_folder)
    if out_folder is not None:
        _save_pages(found, out_folder)
    return found


def _check_arguments(build: Any, steps: Any, randomness: Any, timeout: Any, at_once: Any) -> None:
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == WORKER_MODULE:
        raise ArgumentError(
            "parity.run is called where a worker imports the file of a function, so each worker would start more of "
            'them. Put the call below if __name__ == "__main__": or into another file.'
        )
    if not isinstance(build, Mapping) or not all(isinstance(label, str) and label for label in build):
        raise ArgumentError(
            "build must be a dict of label -> function that makes the model, such as {'torch': make_torch, 'jax': "
            f"make_jax}}. Received: {describe_value(build)}."
        )
    if len(build) < 2:
        raise ArgumentError(f"build must name two sides or more. Received: {', '.join(build) or 'none'}.")
    check_count("steps", steps)
    check_count("at_once", at_once)
    check_randomness(randomness)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentError(f"timeout must be a number of seconds above 0. Received: timeout={timeout!r}.")


def _make_jobs(
    scratch: Path,
    out_folder: Path | None,
    build: Mapping[str, Any],
    data: Any,
    loss_fn: Any,
    recipe: Any,
    steps: int,
    names: Mapping[str, Any] | None,
    rows: Rows | None,
    inputs: Any,
    randomness: str,
    options: Any,
) -> list[SideJob]:
    """Return a job for each side, and write the arrays that the jobs refer to."""
    labels = list(build)
    found = import_paths()
    losses, recipes, given_inputs, given_options = (
        _values_by_label(value, name, labels)
        for name, value in (("loss_fn", loss_fn), ("recipe", recipe), ("inputs", inputs), ("options", options))
    )
    given_names = _names_by_label(names, labels)
    with ArrayStore(scratch / "data.bin") as store:
        batches = _store_data(data, store)
        stored_inputs = {label: _store_inputs(given_inputs[label], store) for label in labels}
    return [
        SideJob(
            side=label,
            number=number,
            folder=str(scratch),
            traces=str(_side_folder(scratch if out_folder is None else out_folder, number, label)),
            paths=found,
            build=make_function_ref(build[label], f"build[{label!r}]"),
            loss_fn=None if losses[label] is None else make_function_ref(losses[label], "loss_fn"),
            recipe=_recipe_message(recipes[label]),
            data=batches,
            inputs=stored_inputs[label],
            steps=steps,
            names=given_names[label],
            rows=None if rows is None else dict(rows),
            randomness=randomness,
            options=_plain_options(options_ if (options_ := given_options[label]) is not None else {}),
        )
        for number, label in enumerate(labels)
    ]


def _values_by_label(value: Any, name: str, labels: Sequence[str]) -> dict[str, Any]:
    """Return label -> the value given for it, or for all."""
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


def _names_by_label(names: Any, labels: Sequence[str]) -> dict[str, dict[str, str] | None]:
    """Return label -> the renamings of the first side's paths for it."""
    if names is None or not isinstance(names, Mapping) or not all(isinstance(each, Mapping) for each in names.values()):
        return dict.fromkeys(labels, None if names is None else dict(names))
    surplus = sorted(set(names) - set(labels[1:]))
    if surplus:
        raise ArgumentError(
            f"names must be for the sides after the first ({', '.join(labels[1:])}), where each has its own. "
            f"Received: {', '.join(surplus)}."
        )
    return {label: dict(names[label]) if label in names else None for label in labels}


def _store_data(data: Any, store: ArrayStore) -> FunctionRef | list[BatchTree]:
    if callable(data):
        return make_function_ref(data, "data")
    check_batches(data, "data")
    if isinstance(data, list):
        return [store.put_tree(batch, "data") for batch in data]
    return [store.put_tree(data, "data")]


def _store_inputs(inputs: Any, store: ArrayStore) -> FunctionRef | BatchTree | None:
    if inputs is None:
        return None
    return make_function_ref(inputs, "inputs") if callable(inputs) else store.put_tree(inputs, "inputs")


def _recipe_message(recipe: Any) -> str | FunctionRef | OwnLoopSpec | None:
    if recipe is None:
        return None
    if isinstance(recipe, OwnLoop):
        begin, step = make_function_ref(recipe.begin, "recipe.begin"), make_function_ref(recipe.step, "recipe.step")
        return OwnLoopSpec(begin=begin, step=step, recipe=recipe.recipe.to_json())
    if not isinstance(recipe, Recipe):
        if callable(recipe):
            return make_function_ref(recipe, "recipe")
        raise RecipeError(
            "recipe must be a polyamp.Recipe, a function of the model that returns one, a polyamp.parity.OwnLoop, or "
            f"None for a forward and backward pass in float32. Received: {describe_value(recipe)}."
        )
    try:
        return recipe.to_json()
    except PolyampError as error:
        raise RecipeError(
            f"recipe goes to other processes as JSON, and {error} Or write a function, def recipe(model): return "
            "polyamp.Recipe(...), and give that: each process calls it with its own model."
        ) from error


def _plain_options(options: Any) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(msgspec.json.encode(options), type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, TypeError, NotImplementedError) as error:  # msgspec's, for unsupported types
        raise ArgumentError(
            'options must be plain data such as {"step": {"compile": True}}: what polyamp.init and train_step are '
            f"given. Received: {describe_value(options)} ({error})."
        ) from error


def _side_folder(root: Path, number: int, label: str) -> Path:
    """Return the folder for a side's trace and output; traces of an earlier run are removed."""
    folder = root / "sides" / f"{number}-{re.sub('[^A-Za-z0-9._-]+', '-', label)}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.trace"):
        old.unlink()
    return folder


def _interpreters_by_label(interpreters: Mapping[str, str | Path], labels: Sequence[str]) -> dict[str, str]:
    surplus = sorted(set(interpreters) - set(labels))
    if surplus:
        raise ArgumentError(
            f"interpreters must be for labels of build ({', '.join(labels)}). Received: {', '.join(surplus)}."
        )
    given = {label: str(Path(path).expanduser()) for label, path in interpreters.items()}
    return {label: shutil.which(given[label]) or given[label] if label in given else sys.executable for label in labels}


def _check_writable(out: Path) -> Path:
    """Check before a long training that the report can be written."""
    from polyamp.files import write_atomically

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "report.json", b"", replace=False)
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written to. Received: {str(out)!r}: {error}.") from error
    return out.absolute()


def _write_data(report: Report, out_folder: Path | None) -> None:
    if out_folder is not None:
        (out_folder / "report.json").write_bytes(encode_report(report))


def _save_pages(report: Report, out_folder: Path) -> None:
    """Write the page and the picture; if drawing fails, only the data is written."""
    try:
        report.save(out_folder)
    except Exception as error:  # noqa: BLE001  # no drawing error may lose the results of a long training
        warnings.warn(str(error), UserWarning, stacklevel=3)


def _interrupt_note(out_folder: Path | None) -> str:
    if out_folder is None:
        return "polyamp.parity.run was interrupted; out= names a folder that keeps what was collected until then."
    return f"polyamp.parity.run was interrupted; what was collected until then: {out_folder / 'report.json'}"


def _ignore_event(event: ParityEvent) -> None:
    """Discard an event."""
