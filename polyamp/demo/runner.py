"""`run`: train a recipe on the handwritten digits in every framework, one process each, and compare the loss curves.

    from polyamp import Recipe
    from polyamp.demo import runner

    report = runner.run(Recipe.load("recipe.toml"), backends=["torch", "jax"], steps=100)
    assert report.ok

All frameworks get the same initial weights and batches, as arrays in one file, so their environments need neither the
same NumPy nor scikit-learn.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.demo.report import (
    DemoReport,
    FrameworkFailure,
    FrameworkPair,
    FrameworkRun,
    PolicyComparison,
    compare,
    distance,
)
from polyamp.demo.worker import (
    DemoEvent,
    DigitsJob,
    FrameworkFailureEvent,
    FrameworkLaunchEvent,
    FrameworkMissingEvent,
    FrameworkStartEvent,
    PolicyProgressEvent,
    PolicyResultEvent,
)
from polyamp.errors import BackendError, PolicyError, RecipeError, did_you_mean
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.worker_processes import OutputQueue, Reaper, Worker

__all__ = [
    "POLICIES",
    "STEPS",
    "DemoEvent",
    "DemoReport",
    "FrameworkFailure",
    "FrameworkFailureEvent",
    "FrameworkLaunchEvent",
    "FrameworkMissingEvent",
    "FrameworkPair",
    "FrameworkRun",
    "FrameworkStartEvent",
    "PolicyComparison",
    "PolicyProgressEvent",
    "PolicyResultEvent",
    "available_backends",
    "compare",
    "demo_recipe",
    "distance",
    "recipe_for",
    "run",
]  # fmt: skip

POLICIES: Final = ("float32", "mixed_bfloat16", "mixed_float16")
STEPS: Final = 200
BATCH_SIZE: Final = 64
TIMEOUT: Final = 900.0
"""Seconds a framework may take for all its policies before its process is ended."""

_EVENT_DECODER: Final = msgspec.json.Decoder(DemoEvent)

OnEvent = Callable[[DemoEvent], None]


def run(
    recipe: Recipe,
    *,
    backends: Sequence[str] | None = None,
    policies: Sequence[str] = POLICIES,
    steps: int = STEPS,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    interpreters: Mapping[str, str | Path] | None = None,
    timeout: float = TIMEOUT,
    on_event: OnEvent | None = None,
) -> DemoReport:
    """Train the digits under every policy in every framework, one framework after the other, and compare the curves.

    Args:
        recipe: training recipe; its policy's dtypes are replaced, see `recipe_for`.
        backends: names of backends; None for every registered framework, installed or not.
        policies: spellings of policies. float32 is added if it is missing: distances are measured from it.
        steps: number of training steps.
        batch_size: digits per step, 1 to 1,437; a multiple of the recipe's `accumulate_steps`.
        seed: of the shuffling, the batches and the initial weights.
        interpreters: backend -> Python interpreter of its environment; this one by default.
        timeout: time limit of one framework in seconds.
        on_event: called with every event, in this thread.

    Raises:
        PolyampError: an unknown backend or policy, or an invalid setting.
    """
    chosen = _check_backends(backends, interpreters or {})
    recipes, baseline = _recipes_by_policy(recipe, policies)
    _check_sizes(steps, batch_size, recipe)
    began = time.perf_counter()
    runs: list[FrameworkRun] = []
    missing: dict[str, str] = {}
    failures: list[FrameworkFailure] = []
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as folder:
        problem = Path(folder) / "problem.npz"
        _write_problem(problem, steps=steps, batch_size=batch_size, seed=seed)
        for backend in chosen:
            job = DigitsJob(
                backend=backend,
                problem=str(problem),
                recipes={policy: settled.to_json() for policy, settled in recipes.items()},
                baseline=baseline,
                report_every=max(1, steps // 40),
            )
            for event in _worker_events(job, str((interpreters or {}).get(backend, sys.executable)), timeout):
                if on_event is not None:
                    on_event(event)
                if isinstance(event, PolicyResultEvent):
                    runs.append(event.run)
                elif isinstance(event, FrameworkMissingEvent):
                    missing[event.backend] = event.message
                elif isinstance(event, FrameworkFailureEvent):
                    failures.append(event.failure)
    comparisons = compare(runs, baseline)
    return DemoReport(
        polyamp=__version__,
        recipes={policy: msgspec.json.decode(settled.to_json()) for policy, settled in recipes.items()},
        baseline=baseline,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        runs=runs,
        comparisons=comparisons,
        missing=missing,
        failures=failures,
        seconds=time.perf_counter() - began,
        ok=bool(runs) and not failures and all(comparison.within for comparison in comparisons),
    )


def demo_recipe() -> Recipe:
    """Return the recipe of `polyamp demo`, `digits.toml` next to this file."""
    return Recipe.load(Path(__file__).with_name("digits.toml"))


def available_backends() -> list[str]:
    """Return the names of the registered frameworks, installed or not. The NumPy reference has no digits model."""
    return sorted(name for name in registry.names() if name != "reference")


def recipe_for(recipe: Recipe, spelling: str) -> Recipe:
    """Return the recipe under another policy.

    The dtypes are those of `spelling`; mode, op list and, under mixed policies, overrides stay the recipe's. The
    recipe's scaler is used where the policy needs loss scaling (float16) and is off elsewhere.

    >>> recipe_for(Recipe(scaler="torch"), "mixed_float16").loss_scaler.init_scale
    65536.0
    >>> recipe_for(Recipe(scaler="torch"), "mixed_bfloat16").loss_scaler.kind
    'off'
    """
    word = Policy(spelling)
    policy = recipe.policy.replace(
        param=word.param,
        compute=word.compute,
        output=word.output,
        mode=word.mode or recipe.policy.mode,
        overrides=dict(recipe.policy.overrides) if word.is_mixed else {},
    )
    return recipe.replace(policy=policy, scaler=recipe.scaler if policy.needs_loss_scaling else LossScaler.off())


def _recipes_by_policy(recipe: Recipe, policies: Sequence[str]) -> tuple[dict[str, Recipe], str]:
    """Return policy -> recipe, including float32, and the spelling of float32 in use."""
    if not policies:
        raise PolicyError(f"policies must name at least one, such as {', '.join(POLICIES)}. Received: none.")
    found = {spelling: recipe_for(recipe, spelling) for spelling in policies}
    for spelling in found:
        word = Policy(spelling)
        if (word.param, word.compute, word.output) == ("float32",) * 3:
            return found, spelling
    return {"float32": recipe_for(recipe, "float32"), **found}, "float32"


def _check_backends(backends: Sequence[str] | None, interpreters: Mapping[str, str | Path]) -> list[str]:
    known = available_backends()
    chosen = (
        list(dict.fromkeys(backends))
        if backends is not None
        else [*known, *(name for name in interpreters if name not in known)]
    )
    if not chosen:
        raise BackendError(f"backends must name at least one of {', '.join(known)}. Received: none.")
    for name in chosen:
        if name not in known and name not in interpreters:
            raise BackendError(
                f"backends must be among {', '.join(known)}. Received: {name!r}.{did_you_mean(name, known)} A backend "
                "that is registered in another environment needs its interpreter: --python NAME=PATH."
            )
    surplus = set(interpreters) - set(chosen)
    if surplus:
        raise BackendError(
            f"an interpreter was given for {', '.join(sorted(surplus))}, which is not among the backends."
        )
    return chosen


def _check_sizes(steps: int, batch_size: int, recipe: Recipe) -> None:
    if steps < 1:
        raise RecipeError(f"steps must be at least 1. Received: steps={steps}.")
    if not 1 <= batch_size <= 1437 or batch_size % recipe.accumulate_steps:
        raise RecipeError(
            f"batch_size must be 1 to 1437 and a multiple of accumulate_steps={recipe.accumulate_steps}. Received: "
            f"batch_size={batch_size}."
        )


def _write_problem(path: Path, *, steps: int, batch_size: int, seed: int) -> None:
    """Write everything that the frameworks share, as arrays in one file."""
    import numpy as np

    from polyamp.demo import digits

    data = digits.load(seed)
    batches = list(digits.batches(data, size=batch_size, steps=steps, seed=seed))
    arrays: dict[str, Any] = {f"weights/{name}": value for name, value in digits.initial_weights(seed).items()}
    arrays |= {f"batches_{key}": np.stack([batch[key] for batch in batches]) for key in ("x", "y")}
    np.savez(path, test_x=data.test_x, test_y=data.test_y, **arrays)


def _worker_events(job: DigitsJob, python: str, timeout: float) -> Iterator[DemoEvent]:
    """Start one worker and yield its events; if it dies, yield a `FrameworkFailureEvent` with the end of its stderr."""
    yield FrameworkLaunchEvent(backend=job.backend)
    heard: OutputQueue = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as folder, Reaper(Path(folder)) as guard:
        log = Path(folder) / "log.txt"
        try:
            worker = Worker(job.backend, python, "polyamp.demo.worker", log=log, heard=heard, guard=guard)
        except OSError as error:
            yield _failure_event(job, f"cannot start {python}: {error.strerror or error}")
            return
        with worker:
            worker.send(msgspec.json.encode(job))
            worker.close_stdin()
            try:
                for line in _read_lines(heard, timeout):
                    yield _EVENT_DECODER.decode(line)
            except msgspec.DecodeError:
                yield _failure_event(
                    job, f"{python} sent what polyamp {__version__} cannot read. Install this version there."
                )
                return
            except TimeoutError:
                yield _failure_event(job, f"ended after the time limit of {timeout:g} s")
                return
            if status := worker.status():
                said = worker.tail() or "it wrote nothing to standard error"
                yield _failure_event(job, f"the process ended with status {status}: {said}")


def _read_lines(heard: OutputQueue, timeout: float) -> Iterator[bytes]:
    """Yield a worker's lines until it closes its output.

    Raises:
        TimeoutError: it exceeds the time limit.
    """
    limit = time.perf_counter() + timeout
    while True:
        try:
            _, line = heard.get(timeout=max(0.0, limit - time.perf_counter()))
        except Empty as error:
            raise TimeoutError from error
        if line is None:
            return
        yield line


def _failure_event(job: DigitsJob, message: str) -> FrameworkFailureEvent:
    return FrameworkFailureEvent(failure=FrameworkFailure(backend=job.backend, policy=None, message=message))
