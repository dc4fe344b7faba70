"""`Monitor`: reads figures of a training every n steps and gives them to writers (S35)."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyamp.errors import ArgumentError, UnsupportedError, describe_value
from polyamp.monitor.module_records import MonitorSource, module_records
from polyamp.monitor.records import FORMAT_VERSION, MonitorHeader, MonitorRecord
from polyamp.monitor.scale_words import ScaleJudge, ScalePoint
from polyamp.monitor.slots import MonitorSelection, MonitorSlots
from polyamp.monitor.writers import MonitorWriter
from polyamp.recipe.recipe import Recipe
from polyamp.results import StepResult
from polyamp.trees import leaves, map_tree


class _PendingRead(NamedTuple):
    """Arrays of a step that are on their way to the host."""

    source: MonitorSource
    call: int
    result: StepResult
    skips: int | None


class Monitor:
    """Reads loss scale, skips, raw loss and unscaled gradient norm every n steps, and statistics of each module.

    Give it to `polyamp.train_step(loss_fn, recipe, monitor=monitor)`, or to another loop: to Keras's `fit` by
    `polyamp_keras.MonitorCallback`, to `polyamp_torch.GradScaler.watch`, or as `monitor=` to the adapters of
    Lightning, Fabric and Accelerate. The statistics are computed on the device, in the
    steps that are read and in no others. They are read while the next step runs.

    Args:
        every: steps between two records. May be changed at any time, as may `enabled`; nothing is compiled again.
        gradients: whether the exponents of each module's gradients are counted.
        weights: whether those of its weights are.
        updates: whether the size of its updates is compared with that of its weights. In torch this copies the
            parameters in the steps that are read.
        modules: None for all modules that have parameters; a depth, to which paths are cut; or globs.
        activations: globs such as "encoder/**" of the modules whose outputs are measured, or True for all modules:
            what underflows or overflows in the compute dtype, the largest absolute value and the root mean square.
        products: whether the rounding of the operands of products in 8 bits is measured (`Policy("mixed_float8")`).
        writers: where records go; see `polyamp.monitor.writers`.

    Raises:
        ArgumentError: an argument of another type or range.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
        >>> monitor = polyamp.Monitor(every=2)
        >>> def loss_fn(model, batch):
        ...     return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])
        >>> state = polyamp.init(MLP.random([4, 8, 1], seed=0), recipe)
        >>> step = polyamp.train_step(loss_fn, recipe, monitor=monitor)
        >>> for _ in range(4):
        ...     state, result = step(state, {"x": np.ones((2, 4), "f4"), "y": np.zeros((2, 1), "f4")})
        >>> [(record.call, record.word) for record in monitor.records]
        [(2, 'searching'), (4, 'searching')]
    """

    def __init__(
        self,
        every: int = 100,
        *,
        gradients: bool = True,
        weights: bool = False,
        updates: bool = True,
        modules: int | str | Sequence[str] | None = None,
        activations: bool | str | Sequence[str] = False,
        products: bool = False,
        writers: Sequence[MonitorWriter] = (),
    ) -> None:
        self.every = every
        self.enabled = True
        _check_modules(modules)
        chosen = (modules,) if isinstance(modules, str) else modules
        chosen = chosen if chosen is None or isinstance(chosen, int) else tuple(chosen)
        outputs = _activation_globs(activations)
        self._selection = MonitorSelection(
            bool(gradients), bool(weights), bool(updates), chosen, 1, outputs, products=bool(products)
        )
        self._writers: list[MonitorWriter] = list(writers)
        for writer in self._writers:
            _check_writer(writer)
        self._records: list[MonitorRecord] = []
        self._pending: list[_PendingRead] = []
        self._judge: ScaleJudge | None = None
        self._header: MonitorHeader | None = None
        self._call = 0
        self._before: tuple[int, int] | None = None
        self._first: StepResult | None = None
        self._run_end: int | None = None

    @property
    def every(self) -> int:
        """Steps between two records."""
        return self._every

    @every.setter
    def every(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"every must be a positive int. Received: {describe_value(value)}.")
        self._every = value

    @property
    def calls(self) -> int:
        """Number of steps that were run, skipped ones included."""
        return self._call

    @property
    def records(self) -> list[MonitorRecord]:
        """All records so far. Reading it waits for the last step that is read."""
        self.flush()
        return list(self._records)

    def __repr__(self) -> str:
        return f"Monitor(every={self.every}, {len(self._records)} records)"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, without arrays of a device. Writers go on at their own risk."""
        self.flush()
        return {**self.__dict__, "_first": None}

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise if a step of this recipe has nothing of what is selected.

        Raises:
            ArgumentError: products in 8 bits are selected, and the policy has none.
        """
        if self._selection.products and recipe.policy.float8 is None:
            raise ArgumentError(
                "Monitor(products=True) measures products in 8 bits, which the policy 'mixed_float8' has (S36). "
                f"Received: a recipe with {recipe.policy}. Leave out products=, or use that policy."
            )

    def selection(self, recipe: Recipe, *, traced: bool) -> MonitorSelection:
        """Return what a step of this recipe collects; `traced`: one inside of the user's own compiled function."""
        compute = recipe.policy.compute if self._selection.activations else ""
        return self._selection._replace(every=self.every if traced else 1, compute=compute)

    def loop_selection(self) -> MonitorSelection:
        """Return what a step of another library's loop collects, which calls the model by itself.

        Raises:
            UnsupportedError: outputs of modules, or products in 8 bits, are selected.
        """
        chosen = self._selection
        if chosen.activations or chosen.products:
            what = f"activations={list(chosen.activations)}" if chosen.activations else "products=True"
            raise UnsupportedError(
                f"Monitor({what}) is read by polyamp.train_step(..., monitor=monitor) alone, which knows where a pass "
                f"begins and ends. Leave out {what.partition('=')[0]}= in this loop."
            )
        return chosen

    def begin_call(self) -> bool:
        """Count a call of the step, and return whether it is read. Called by `train_step`."""
        self._call += 1
        return self.is_due(self._call)

    def is_due(self, call: int) -> bool:
        """Return whether a call would be read."""
        return self.enabled and call % self.every == 0

    def begin_run(self, step: int) -> None:
        """Count skips from this number of updates on. Called where a loop of another library begins, such as `fit`.

        What the model was trained without the monitor since `end_run` is left out.
        """
        self.flush()
        calls, steps = self._before or (self._call, step)
        self._before = (calls, steps + (0 if self._run_end is None else step - self._run_end))
        self._run_end = None

    def end_run(self, step: int) -> None:
        """Note the number of updates at the end of what `begin_run` began, and read what is still on the device."""
        self.flush()
        self._run_end = step

    def cancel_call(self) -> None:
        """Count the last call of `begin_call` no more: the step raised and changed nothing."""
        self._call -= 1

    def end_call(self, state: Any, result: StepResult, *, due: bool) -> None:
        """Take the result of the step that `begin_call` began, and the state after it. Called by `train_step`."""
        if self._pending:
            self.flush()  # the device works on this step meanwhile
        if self._first is None and self._before is None:
            self._first = result._replace(aux=None, monitor=None)
        if due:
            _start_copies(result)
            self._pending.append(_PendingRead(monitor_source(state), self._call, result._replace(aux=None), None))

    def flush(self) -> None:
        """Read what is still on the device."""
        while self._pending:
            self._take(self._pending.pop(0))

    def read(self, source_state: Any, result: StepResult) -> list[MonitorRecord]:
        """Read the results of steps inside of a compiled function of your own, such as `jax.lax.scan` over steps.

        Args:
            source_state: the state before or after them.
            result: the step's result that the function returned; after a scan each leaf has a leading axis of steps.

        Returns:
            The new records, which also go to `records` and the writers.

        Raises:
            ArgumentError: the result has no figures of a monitor.
        """
        if result.monitor is None:
            raise ArgumentError(
                "result must be that of a step made with train_step(..., monitor=monitor) and called inside of a "
                "compiled function. Received: a StepResult without figures of a monitor."
            )
        self.flush()
        source = monitor_source(source_state)
        read = source.to_numpy(result.monitor.read)
        known = len(self._records)
        skipped = source.to_numpy(result.skipped).reshape(-1)
        begin = self._call
        self._call += len(skipped)
        last = 0
        for index in range(len(skipped)):
            if bool(read.reshape(-1)[index]):
                skips = int(skipped[last : index + 1].sum())
                last = index + 1
                one = result if read.ndim == 0 else _element(result, index)
                self._take(_PendingRead(source, begin + index + 1, one, skips))
        return self._records[known:]

    def save(self, path: str | Path) -> Path:
        """Draw all records to an .html or .png file (extra `parity`); see `polyamp.report_page.page_files.save_page`.

        Raises:
            ArgumentError: another suffix, or a path that cannot be written to; nothing was recorded.
        """
        from polyamp.monitor.monitor_page import monitor_page
        from polyamp.report_page.page_files import save_page

        records = self.records
        if self._header is None:
            raise ArgumentError("save: nothing was recorded yet. Run at least `every` steps first.")
        return save_page(monitor_page(self._header, records), path)

    def add_writer(self, writer: MonitorWriter) -> None:
        """Give the records from now on to a further writer, such as one of a tracker that is made after the monitor.

        Raises:
            ArgumentError: it has no `write(record)` and `close()`.
        """
        _check_writer(writer)
        self.flush()
        self._writers.append(writer)
        if self._header is not None:
            self._begin_writer(writer, self._header)

    def close(self) -> None:
        """Read what is still on the device, and close the writers."""
        self.flush()
        for writer in self._writers:
            self._attempt(writer, writer.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, pending: _PendingRead) -> None:
        """Make a record of a step's arrays."""
        source, result = pending.source, pending.result

        def number(array: Any) -> float:
            return float(source.to_numpy(array))

        slots: MonitorSlots = result.monitor
        scale, step, skipped = number(slots.scale), int(number(result.step)), bool(number(result.skipped))
        skips = pending.skips
        if skips is None:
            skips = self._count_skips(pending.call, step, number)
        if self._judge is None:
            self._judge = ScaleJudge(source.recipe.loss_scaler)
            self._begin_writers(source)
        next_scale = number(result.scale)
        word, reason = self._judge(ScalePoint(pending.call, next_scale, skips))
        record = MonitorRecord(
            call=pending.call,
            step=step,
            loss=math.nan if result.loss is None else number(result.loss),
            grad_norm=number(result.grad_norm),
            scale=scale,
            next_scale=next_scale,
            skipped=skipped,
            skips=skips,
            word=word,
            reason=reason,
            modules=module_records(self._selection, source, slots, scale),
        )
        self._records.append(record)
        for writer in tuple(self._writers):
            self._attempt(writer, functools.partial(writer.write, record))

    def _count_skips(self, call: int, step: int, number: Callable[[Any], float]) -> int | None:
        """Return the number of skips since the last record, from the numbers of calls and of updates."""
        if self._before is None:
            first = self._first
            if first is None:
                return None
            self._before = (0, int(number(first.step)) - (0 if bool(number(first.skipped)) else 1))
            self._first = None
        calls, steps = self._before
        self._before = (call, step)
        return call - calls - (step - steps)

    def _begin_writers(self, source: MonitorSource) -> None:
        policy = source.recipe.policy
        header = self._header = MonitorHeader(
            polyamp_monitor=FORMAT_VERSION,
            compute=policy.compute,
            policy=str(policy),
            every=self.every,
            backend=source.backend,
        )
        for writer in tuple(self._writers):
            self._begin_writer(writer, header)

    def _begin_writer(self, writer: MonitorWriter, header: MonitorHeader) -> None:
        begin = getattr(writer, "begin", None)
        if begin is not None:
            self._attempt(writer, functools.partial(begin, header))

    def _attempt(self, writer: MonitorWriter, action: Callable[[], None]) -> None:
        """Run a writer's method; one that fails, because the disk is full, is left out from then on."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  # whatever a tracker raises, it must not end a training
            if writer in self._writers:
                self._writers.remove(writer)
            warnings.warn(
                f"{type(writer).__name__} could not write ({type(error).__name__}: {error}) and gets no further "
                "records. monitor.records has all of them.",
                RuntimeWarning,
                stacklevel=2,
            )


def _start_copies(result: StepResult) -> None:
    """Begin to copy a result's arrays to the host, where the framework's arrays can do that without waiting (JAX)."""
    for _, array in leaves(result):
        start = getattr(array, "copy_to_host_async", None)
        if start is not None:
            start()


def monitor_source(state: Any) -> MonitorSource:
    """Return what the records of a state's training are of."""
    backend = state.backend
    return MonitorSource(backend.name, state.recipe, list(state.groups.numbers), backend.to_numpy)


def _element(result: StepResult, index: int) -> StepResult:
    """Return the result of one step out of results with a leading axis of steps."""
    slots = result.monitor
    return result._replace(
        **{
            name: None if getattr(result, name) is None else getattr(result, name)[index]
            for name in ("loss", "grad_norm", "scale", "skipped", "step")
        },
        monitor=map_tree(lambda array: None if array is None else array[index], slots),
    )


def _check_writer(writer: Any) -> None:
    if not callable(getattr(writer, "write", None)) or not callable(getattr(writer, "close", None)):
        raise ArgumentError(f"each of writers must have write(record) and close(). Received: {describe_value(writer)}.")


def _activation_globs(activations: Any) -> tuple[str, ...]:
    if isinstance(activations, bool):
        return ("*",) if activations else ()
    if isinstance(activations, str):
        return (activations,)
    if isinstance(activations, Sequence) and activations and all(isinstance(each, str) for each in activations):
        return tuple(activations)
    raise ArgumentError(
        "activations must be True for the outputs of all modules, False, or globs of module paths such as "
        f"'encoder/**'. Received: {describe_value(activations)}."
    )


def _check_modules(modules: Any) -> None:
    if modules is None or isinstance(modules, str):
        return
    if isinstance(modules, int) and not isinstance(modules, bool) and modules > 0:
        return
    if isinstance(modules, Sequence) and modules and all(isinstance(each, str) for each in modules):
        return
    raise ArgumentError(
        "modules must be None, a positive depth such as 2, or globs of module paths such as 'layers/*'. Received: "
        f"{describe_value(modules)}."
    )
