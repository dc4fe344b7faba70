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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.demo import digits
from polyamp.demo.comparison_report import DemoReport, FrameworkFailure, FrameworkRun, compare
from polyamp.demo.digits import BATCH_SIZE, POLICIES, STEPS, TIMEOUT
from polyamp.demo.worker import DemoEvent, DemoMessage, DigitsJob, PolicyResultEvent
from polyamp.errors import BackendError, PolicyError, RecipeError, did_you_mean
from polyamp.parity.execution.memory_mapped_arrays import ArrayStore
from polyamp.parity.execution.worker_messages import ParityEvent, SideFailureEvent
from polyamp.parity.execution.worker_pool import SideProcess, WorkerPool
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler

OnEvent = Callable[[ParityEvent], None]


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

    def collect(event: DemoEvent) -> None:
        if isinstance(event, PolicyResultEvent):
            runs.extend([event.run] if event.run is not None else [])
            if event.failure is None:
                return
            event = SideFailureEvent(failure=event.failure)
        if isinstance(event, SideFailureEvent):
            side, policy, message = event.failure.side, event.failure.phase or None, event.failure.message
            if event.failure.reason == "missing":
                missing[side] = message
            else:
                failures.append(FrameworkFailure(backend=side, policy=policy, message=message))
        if on_event is not None:
            on_event(event)

    with tempfile.TemporaryDirectory(prefix="polyamp-parity-") as scratch:
        folder = Path(scratch)
        with ArrayStore(folder / "problem.bin") as store:
            problem = store.put_tree(digits.problem(size=batch_size, steps=steps, seed=seed), "problem")
        sides = []
        for number, backend in enumerate(chosen):
            job = DigitsJob(
                side=backend,
                arrays=str(folder / "problem.bin"),
                problem=problem,
                recipes={policy: each.to_json() for policy, each in recipes.items()},
                baseline=baseline,
            )
            python = str((interpreters or {}).get(backend, sys.executable))
            (folder / str(number)).mkdir()
            sides.append(SideProcess(label=backend, folder=folder / str(number), job=job, python=python))
        pool = WorkerPool(sides, folder, timeout, collect, module="polyamp.demo.worker", message_type=DemoMessage)
        pool.run(aligned=False)
    comparisons = compare(runs, baseline)
    return DemoReport(
        polyamp=__version__,
        recipes={policy: msgspec.json.decode(each.to_json()) for policy, each in recipes.items()},
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
