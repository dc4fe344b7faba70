"""The process that trains descriptions in one framework: `python -m tests.fuzz.worker FRAMEWORK`.

It reads one job per line, `{"description": ..., "policy": null or a name, "compile": bool, "plant": null or a name}`,
and writes one record per line, see `train`. Started by `pool`; `train` is what a printed reproduction calls.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from typing import Any, Final

import numpy as np

import polyamp
from polyamp.contract import registry
from tests.fuzz import plants, problem
from tests.fuzz.grammar import Description, walk

FRAMEWORKS: Final = ("torch", "tensorflow", "jax")
BUILDERS: Final = ("reference", *FRAMEWORKS)
MOVES_AT_SKIPS: Final = ("loss_scale/", "rng/")

Record = dict[str, Any]


def train(
    framework: str,
    description: Description,
    *,
    policy: str | None = None,
    compile: bool | None = None,  # noqa: A002  # the step's option has this name
    plant: str | None = None,
) -> Record:
    """Train a description in this process.

    Args:
        framework: "torch", "tensorflow", "jax" or "reference".
        description: what `grammar.describe` returned, or a smaller one.
        policy: another policy than the description's, without its overrides; the baseline is "float32".
        compile: the step's option of this name; None leaves the framework's default.
        plant: a fault to put in, see `plants`.

    Returns:
        Lists with an entry per step ("loss", "plain", "grad_norm", "scale", "skipped", "step"), "scale_state",
        "parameters" and "running" by name, "violations" of rules that one framework can break alone, and whether
        this framework cuts 16-bit products off on this processor ("cut_off").
    """
    if framework == "jax" and problem.wide(description):
        import jax

        x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
        with x64(True):
            return _train(framework, description, policy, compile, plant)
    return _train(framework, description, policy, compile, plant)


def _train(
    framework: str,
    description: Description,
    policy: str | None,
    compile: bool | None,  # noqa: A002  # the step's option has this name
    plant: str | None,
) -> Record:
    builder = importlib.import_module(f"tests.fuzz.build_{framework}")
    weights = problem.weights(description)
    recipe = plants.recipe(plant, problem.recipe(description, policy))
    options: dict[str, Any] = {} if compile is None or framework == "reference" else {"compile": compile}
    backend = registry.get(framework)

    def fresh() -> Any:
        return polyamp.init(builder.build(description, weights), recipe)

    if description.get("counts") == "weight":
        options["weight"] = problem.weight_function(description, _sum(framework))
    state = fresh()
    loss_fn = problem.loss_function(description, _mean(framework), plants.factor(plant, recipe))
    step = _halves(loss_fn, options) if description["halves"] else polyamp.train_step(loss_fn, recipe, **options)
    record: Record = {name: [] for name in ("loss", "plain", "grad_norm", "scale", "skipped", "step")}
    cut_off = framework == "tensorflow" and recipe.policy.compute == "bfloat16" and builder.cuts_bfloat16_off()
    watch = Watch(backend, description)
    watch.begin(state)
    for number, batch in enumerate(problem.batches(description)):
        if number == description["resume"]:
            state = backend.import_state(fresh(), backend.export_state(state))
        watch.before(state, number)
        state, result = step(state, batch)
        state, result = plants.after(plant, state, result, backend)
        values = {"loss": result.loss, "plain": result.aux["plain"], **result._asdict()}
        for name in record:
            record[name].append(np.asarray(backend.to_numpy(values[name])).astype(np.float64).tolist())
        watch.after(state, number, bool(record["skipped"][-1]))
    watch.end(state)
    called = getattr(state.model, "calls", 0)
    if description.get("python") and framework == "torch" and description["resume"] is None:
        wanted = description["steps"] * description["accumulate_steps"]
        if called != wanted:
            watch.violations.append(f"the model ran {called} times and not {wanted}")
    passes = int(record["step"][-1]) * description["accumulate_steps"]
    averages = builder.averages(state, description) if has_averages(recipe) else {}
    kept = {
        "parameters": builder.parameters(state, description) | {f"average {n}": value for n, value in averages.items()},
        "running": builder.running(state, description, passes),
    }
    scale = {name: float(backend.to_numpy(value)) for name, value in state.scale_state._asdict().items()}
    return {**record, **kept, "scale_state": scale, "violations": watch.violations, "cut_off": cut_off}


def has_averages(recipe: polyamp.Recipe) -> bool:
    """Whether a state has averages, of the recipe or of its optimizer."""
    return recipe.ema is not None or getattr(recipe.optimizer, "has_average", False)


def _halves(loss_fn: Any, options: dict[str, Any]) -> Any:
    """The step as its two halves."""
    differentiate = polyamp.value_and_grad(loss_fn, **options)

    def step(state: Any, batch: Any) -> Any:
        (loss, aux), gradients = differentiate(state, batch)
        state, result = polyamp.apply_gradients(state, gradients)
        return state, result._replace(loss=loss, aux=aux)

    return step


def unused(description: Description) -> list[str]:
    """Names of the layers whose parameters the loss does not depend on."""
    layers = [layer["name"] for layer in walk(description["layers"]) if layer["op"] in ("unused", "detached")]
    return layers + [head["name"] for head in description["heads"] if head["loss"] == "unused"]


class Watch:
    """Rules that need no second framework: skipped steps change nothing (S12), nor do unused parameters (S23)."""

    def __init__(self, backend: Any, description: Description) -> None:
        self.backend = backend
        self.overflows = description["overflows"]
        self.unused = unused(description)
        self.violations: list[str] = []
        self.start: dict[str, Any] = {}
        self.held: dict[str, Any] = {}

    def begin(self, state: Any) -> None:
        """Note the arrays of what no step may move."""
        if self.unused:
            self.start = {name: v for name, v in self._export(state).items() if self._is_unused(name)}
            if not self.start:
                self.violations.append(f"no array of the state is named after {self.unused}")

    def before(self, state: Any, number: int) -> None:
        """Note everything before a step that overflows."""
        self.held = self._export(state) if number in self.overflows else {}

    def after(self, state: Any, number: int, skipped: bool) -> None:
        """Compare everything after a step that was skipped."""
        if skipped and self.held:
            kept = {name: value for name, value in self.held.items() if not name.startswith(MOVES_AT_SKIPS)}
            self._compare(kept, self._export(state), f"S12: step {number} was skipped")

    def end(self, state: Any) -> None:
        """Compare what no step may move."""
        if self.unused:
            self._compare(self.start, self._export(state), "S23: unused")

    def _is_unused(self, name: str) -> bool:
        return any(part in self.unused for part in name.replace(".", "/").split("/"))

    def _export(self, state: Any) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.backend.export_state(state).items()}

    def _compare(self, before: dict[str, Any], after: dict[str, Any], what: str) -> None:
        moved = [name for name, value in before.items() if after[name].tobytes() != value.tobytes()]
        if moved:
            self.violations.append(f"{what}, but these arrays changed: {', '.join(sorted(moved))}")


def _mean(framework: str) -> Any:
    """`mean(array, other)`: in the dtype of the other in TensorFlow, whose operators mix none."""
    if framework == "torch":
        import torch

        return lambda array, other: torch.mean(array)
    if framework == "tensorflow":
        import tensorflow as tf

        return lambda array, other: tf.cast(tf.reduce_mean(array), other.dtype)
    if framework == "jax":
        import jax.numpy as jnp

        return lambda array, other: jnp.mean(array)
    return lambda array, other: np.mean(array)


def _sum(framework: str) -> Any:
    """How many are true."""
    if framework == "torch":
        return lambda mask: mask.sum()
    if framework == "tensorflow":
        import tensorflow as tf

        return lambda mask: tf.reduce_sum(tf.cast(mask, tf.float32))
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.sum
    return np.sum


def encoded(record: Record) -> Record:
    """Arrays as text, for JSON."""
    arrays = ("parameters", "running")
    return {k: {n: encode(v) for n, v in record[k].items()} if k in arrays else record[k] for k in record}


def encode(value: Any) -> list[Any]:
    """[shape, base64 of float32, or of float64 where it is that]."""
    wide = np.ascontiguousarray(value, None if np.asarray(value).dtype == np.float64 else np.float32)
    return [list(wide.shape), base64.b64encode(wide.tobytes()).decode(), wide.dtype.name]


def decode(value: list[Any]) -> Any:
    """What `encode` was given."""
    return np.frombuffer(base64.b64decode(value[1]), value[2]).reshape(value[0])


def main() -> None:
    """Answer jobs until standard input ends."""
    framework = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a framework prints is no answer
    warnings.simplefilter("ignore")
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
    if framework == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    registry.get(framework)
    print(json.dumps({"ready": framework}), file=answers, flush=True)
    for count, line in enumerate(sys.stdin, 1):
        job = json.loads(line)
        start = time.process_time()
        try:
            found = encoded(train(framework, **job))
        except Exception as error:  # noqa: BLE001  # whatever a framework raises is a finding
            found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        found["seconds"] = time.process_time() - start
        print(json.dumps(found), file=answers, flush=True)
        if count % 20 == 0:
            _forget(framework)


def _forget(framework: str) -> None:
    """Drop what a framework keeps of models that are gone."""
    if framework == "tensorflow":
        import keras

        keras.backend.clear_session()
    if framework == "jax":
        import jax

        jax.clear_caches()


if __name__ == "__main__":
    main()
