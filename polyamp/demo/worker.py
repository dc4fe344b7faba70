"""Main program of the process that trains the digits in one framework.

It reads a `DigitsJob` as JSON from standard input and writes one JSON event per line to standard output. It uses only
polyamp's public functions and the digits model of the backend's harness.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

import polyamp
from polyamp import losses
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.demo.report import FrameworkFailure, FrameworkRun
from polyamp.errors import BackendNotInstalledError, PolyampError
from polyamp.recipe.recipe import Recipe
from polyamp.worker_processes import claim_stdio

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray[Any, Any]]


class DigitsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a worker.

    Attributes:
        backend: name of the backend.
        problem: path of the `.npz` file with batches, held-out digits and initial weights.
        recipes: policy -> recipe as JSON text, in the order to run them.
        baseline: the policy from which distances are measured.
        report_every: steps between two progress events.
    """

    backend: str
    problem: str
    recipes: dict[str, str]
    baseline: str
    report_every: int


class FrameworkLaunchEvent(msgspec.Struct, frozen=True, kw_only=True, tag="starting"):
    """The process is about to start and import its framework. The only event that the worker does not send."""

    backend: str


class FrameworkStartEvent(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The framework is imported."""

    backend: str
    version: str
    device: str


class PolicyProgressEvent(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Steps are done: `step` of `steps` under this policy."""

    backend: str
    policy: str
    step: int
    steps: int
    loss: float | None
    scale: float
    skipped: int


class PolicyResultEvent(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """One policy is done."""

    run: FrameworkRun


class FrameworkMissingEvent(msgspec.Struct, frozen=True, kw_only=True, tag="missing"):
    """The framework is not installed; the message has the install command."""

    backend: str
    message: str


class FrameworkFailureEvent(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The framework failed, or one policy of it."""

    failure: FrameworkFailure


DemoEvent = (
    FrameworkLaunchEvent
    | FrameworkStartEvent
    | PolicyProgressEvent
    | PolicyResultEvent
    | FrameworkMissingEvent
    | FrameworkFailureEvent
)
EmitEvent = Callable[[DemoEvent], None]


def main() -> None:
    """Run the job from standard input."""
    import numpy as np

    channel = claim_stdio()

    def emit(event: DemoEvent) -> None:
        channel.lines.write(msgspec.json.encode(event).decode() + "\n")
        channel.lines.flush()

    job = msgspec.json.decode(channel.commands.read(), type=DigitsJob)
    with np.load(job.problem) as file:
        problem = {name: file[name] for name in file.files}
    run_job(job, problem, emit)


def run_job(job: DigitsJob, problem: Arrays, emit: EmitEvent) -> None:
    """Train under each of the job's policies. A `PolyampError` becomes a `FrameworkFailureEvent`; the others go on."""
    try:
        backend = registry.get(job.backend)
    except BackendNotInstalledError as error:
        emit(FrameworkMissingEvent(backend=job.backend, message=str(error)))
        return
    except PolyampError as error:
        emit(FrameworkFailureEvent(failure=FrameworkFailure(backend=job.backend, policy=None, message=str(error))))
        return
    info = backend.info()
    emit(FrameworkStartEvent(backend=job.backend, version=str(info.version), device=info.devices[0]))
    for policy in job.recipes:
        try:
            emit(PolicyResultEvent(run=train(job, policy, backend, problem, emit)))
        except PolyampError as error:
            emit(
                FrameworkFailureEvent(failure=FrameworkFailure(backend=job.backend, policy=policy, message=str(error)))
            )


def loss_fn(model: Any, batch: Any) -> Any:
    """Return the loss of the digits, with the same code in every framework."""
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def train(job: DigitsJob, policy: str, backend: Backend, problem: Arrays, emit: EmitEvent) -> FrameworkRun:
    """Train under one policy and measure it."""
    recipe = Recipe.from_json(job.recipes[policy])
    state = _initial_state(backend, recipe, problem)
    step = polyamp.train_step(loss_fn, recipe)
    steps = len(problem["batches_x"])
    curve: list[float | None] = []
    norms: list[float | None] = []
    scales: list[float] = []
    skips: list[bool] = []
    times: list[float] = []
    applied = 0
    for number in range(steps):
        batch = _batch(problem, number)
        began = time.perf_counter()
        state, result = step(state, batch)
        curve.append(_host_number(backend, result.loss))
        times.append(time.perf_counter() - began)
        norms.append(_host_number(backend, result.grad_norm))
        scales.append(float(backend.to_numpy(result.scale)))
        skips.append(bool(backend.to_numpy(result.skipped)))
        applied = int(backend.to_numpy(result.step))
        if (number + 1) % job.report_every == 0 or number + 1 == steps:
            emit(PolicyProgressEvent(backend=job.backend, policy=policy, step=number + 1, steps=steps, loss=curve[-1],
                          scale=scales[-1], skipped=sum(skips)))  # fmt: skip
    info = backend.info()
    return FrameworkRun(
        backend=job.backend,
        policy=policy,
        version=str(info.version),
        device=info.devices[0],
        losses=curve,
        grad_norms=norms,
        scales=scales,
        skips=skips,
        accuracy=_accuracy(backend, recipe, state, problem),
        applied=applied,
        ms_per_step=1000.0 * statistics.median(times[1:] or times),
        twin_losses=_float32_twin_losses(job, backend, problem, skips) if any(skips) else None,
    )


def _float32_twin_losses(job: DigitsJob, backend: Backend, problem: Arrays, skips: list[bool]) -> list[float | None]:
    """Return the float32 losses of a run without the updates of the steps in `skips`."""
    recipe = Recipe.from_json(job.recipes[job.baseline])
    state = _initial_state(backend, recipe, problem)
    step, look = polyamp.train_step(loss_fn, recipe), polyamp.value_and_grad(loss_fn)
    curve = []
    for number, skipped in enumerate(skips):
        batch = _batch(problem, number)
        if skipped:
            loss, _ = look(state, batch)
        else:
            state, result = step(state, batch)
            loss = result.loss
        curve.append(_host_number(backend, loss))
    return curve


def _initial_state(backend: Backend, recipe: Recipe, problem: Arrays) -> Any:
    weights = {name.removeprefix("weights/"): value for name, value in problem.items() if name.startswith("weights/")}
    return polyamp.init(backend.testing().digits(weights), recipe, backend=backend.name)


def _batch(problem: Arrays, number: int) -> Arrays:
    return {"x": problem["batches_x"][number], "y": problem["batches_y"][number]}


def _accuracy(backend: Backend, recipe: Recipe, state: Any, problem: Arrays) -> float:
    predict = recipe.policy.autocast(state.model, backend=backend.name)
    logits = backend.to_numpy(predict(backend.testing().array(problem["test_x"])))
    return float((logits.astype("float32").argmax(axis=-1) == problem["test_y"]).mean())


def _host_number(backend: Backend, scalar: Any) -> float | None:
    value = float(backend.to_numpy(scalar))
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()
