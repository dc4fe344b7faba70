"""JAX's trials: parameters replicated or sharded over a mesh of forced host devices, the batch sharded; or all of the
step inside `shard_map`.

Seeds that differ in their data alone are trained by the same compiled step. The device that is given the same global
batch is the first one of the mesh, alone.
"""

from __future__ import annotations

import functools
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyamp
from tests.soak import trial as trials_
from tests.soak.trial import Outcome, Trial

AXIS: Final = "replica"
SPLIT: Final = {"first": (None, AXIS), "second": (AXIS, None), "head": (AXIS, None), "first_bias": (AXIS,)}
"""How the sharded ones of the weights lie on the mesh."""


class Seen(NamedTuple):
    """What was seen of a training.

    Attributes:
        decisions: of each device, (skipped, scale) after each step.
        digests: of each device, name -> digest after each step, of what all devices hold.
        whole: of all devices together, name -> digest after each step.
        losses: of each step.
        parameters: name -> array after the last step.
    """

    decisions: list[list[tuple[bool, float]]]
    digests: list[list[dict[str, str]]]
    whole: list[dict[str, str]]
    losses: list[float]
    parameters: dict[str, Any]


class Network(nn.Module):
    """The same as torch's."""

    norm: str
    unused: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Dense(trials_.HIDDEN, name="first")(x)
        if self.norm == "layer":
            h = nn.LayerNorm(name="norm")(h)
        elif self.norm == "batch":
            h = nn.BatchNorm(use_running_average=False, name="norm")(h)
        h = jax.nn.relu(nn.Dense(trials_.HIDDEN, name="second")(jax.nn.relu(h)))
        if self.unused:
            self.param("unused", nn.initializers.ones, (trials_.HIDDEN,))
        return nn.Dense(trials_.CLASSES, name="head")(h)


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


@functools.cache
def made(
    policy: str, optimizer: str, clip: float | None, accumulate: int, mapped: int
) -> tuple[polyamp.Recipe, Callable[..., Any]]:
    """A recipe, and a step that all trials share which differ in their data alone; `mapped` is the number of replicas
    of `shard_map`, or 0."""
    trial = trials_.draw("jax", 0)._replace(policy=policy, optimizer=optimizer, clip_norm=clip, accumulate=accumulate)
    recipe = trial.recipe()
    step: Callable[..., Any] = polyamp.train_step(loss_fn, recipe)
    if mapped:
        everywhere, by_rows = PartitionSpec(), PartitionSpec(AXIS)
        specs = {"in_specs": (everywhere, by_rows), "out_specs": (everywhere, everywhere)}
        step = jax.jit(jax.shard_map(step, mesh=mesh_of(mapped), **specs))
    return recipe, step


def mesh_of(world: int) -> Mesh:
    """So many devices."""
    return Mesh(np.asarray(jax.devices()[:world]), (AXIS,))


def variables(trial: Trial, nudge: float) -> tuple[Any, Any]:
    """The module, and its variables with the trial's weights, each moved by `nudge` of itself."""
    module = Network(trial.norm, trial.unused)
    made_ = module.init(jax.random.key(0), jnp.zeros((2, trials_.INPUTS)))
    rng = np.random.default_rng(0)
    params = dict(made_["params"])
    for name, array in trial.weights().items():
        moved = array * (1 + nudge * rng.choice((-1, 1), array.shape)).astype(np.float32)
        layer, bias = name.removesuffix("_bias"), name.endswith("_bias")
        if name == "unused":
            params[name] = jnp.asarray(moved)
        else:
            params[layer] = {**params[layer], "bias" if bias else "kernel": jnp.asarray(moved)}
    return module, {**made_, "params": params}


def placed(trial: Trial, tree: Any, mesh: Mesh) -> Any:
    """The variables on the mesh, replicated or sharded."""

    def put(path: Any, array: Any) -> Any:
        names = [key.key for key in path]
        name = f"{names[-2]}_bias" if names[-1] == "bias" else names[-2] if names[-1] == "kernel" else names[-1]
        spec = SPLIT.get(name, ()) if trial.engine == "sharded" and names[0] == "params" else ()
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree_util.tree_map_with_path(put, tree)


def trained(trial: Trial, policy: str = "", nudge: float = 0.0, *, alone: bool = False) -> Seen:
    """A trial on its mesh, or on one device."""
    inside, each = trial.engine == "shard_map", trial.norm == "batch"
    split = trial.accumulate * trial.world if alone and inside and each else trial.accumulate
    mapped = trial.world if inside and not alone else 0
    recipe, step = made(policy or trial.policy, trial.optimizer, trial.clip_norm, split, mapped)
    module, tree = variables(trial, nudge)
    mesh = mesh_of(trial.world)
    state = polyamp.init((module, tree if alone else placed(trial, tree, mesh)), recipe)
    places = [device.id for device in jax.devices()[: 1 if alone else trial.world]]
    seen = Seen([[] for _ in places], [[] for _ in places], [], [], {})
    before = None if alone else shardings(state)
    for parts in trial.parts():
        if alone and each and not inside:  # a micro-batch has its part of every shard, and is normalised by itself
            cut = [{name: np.array_split(rows, split) for name, rows in part.items()} for part in parts]
            parts = [{name: part[name][number] for name in part} for number in range(split) for part in cut]
        batch: Any = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if not alone:
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS)))
        state, result = step(state, batch)
        seen.losses.append(float(result.loss))
        seen.whole.append({name: digest(leaf) for name, leaf in leaves(state)})
        for number, place in enumerate(places):
            scale = local(result.scale, place)
            seen.decisions[number].append((bool(local(result.skipped, place)), float(scale)))
            held = {name: local(leaf, place) for name, leaf in leaves(state) if leaf.is_fully_replicated}
            seen.digests[number].append({name: digest(array) for name, array in held.items()})
    after = dict(leaves(state))
    moved = [
        name for name, how in (before or {}).items() if not how.is_equivalent_to(after[name].sharding, after[name].ndim)
    ]
    if moved:
        raise AssertionError(f"{moved[0]} lay as {before[moved[0]]}, and lies as {after[moved[0]].sharding}")
    seen.parameters.update({"/".join(k.key for k in path): np.asarray(a) for path, a in _paths(state.model[1])})
    return seen


def _paths(tree: Any) -> list[Any]:
    return jax.tree_util.tree_flatten_with_path(tree["params"])[0]


def leaves(state: Any) -> list[tuple[str, Any]]:
    """The arrays of a state, with names."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]]


def shardings(state: Any) -> dict[str, Any]:
    """How each of them lies."""
    return {name: leaf.sharding for name, leaf in leaves(state) if isinstance(leaf.sharding, NamedSharding)}


def local(array: Any, place: int) -> Any:
    """A device's part."""
    (found,) = [shard.data for shard in array.addressable_shards if shard.device.id == place] or [array]
    return np.asarray(found)


def digest(array: Any) -> str:
    """Bit for bit."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def judged(trial: Trial) -> Outcome:
    """A trial, and what did not hold."""
    began = time.perf_counter()
    seen, base = trained(trial), trained(trial, alone=True)
    failures = trials_.decisions(trial, seen.decisions, [scale for _, scale in base.decisions[0]])
    failures += trials_.alike(seen.digests)
    moving = ("scale", "watch", "attempts", "rng", "skip")
    names = [name for name in seen.whole[0] if not any(word in name for word in moving)]
    failures += trials_.untouched(trial, [seen.whole], names)
    _, tree = variables(trial, 0.0)
    start = {"/".join(key.key for key in path): np.asarray(array) for path, array in _paths(tree)}

    def one(policy: str, nudge: float) -> dict[str, Any]:
        if (policy, nudge) == (trial.policy, 0.0):
            return base.parameters
        return trained(trial, policy, nudge, alone=True).parameters

    apart, said = trials_.near(trial, seen.parameters, one, start)
    limit = {"float32": 1e-4, "mixed_bfloat16": 0.1, "mixed_float16": 0.02}[trial.policy]
    for step, (own, other) in enumerate(zip(seen.losses, base.losses, strict=True)):
        if not (trial.skipped[step] or abs(own - other) <= limit * max(abs(other), 0.1)):
            said.append(f"losses of step {step}: {own:g}, on one device {other:g}")
    if trial.unused and not np.array_equal(seen.parameters["unused"], start["unused"]):
        said.append("the unused parameter moved")
    seconds = time.perf_counter() - began
    return Outcome(
        trial.seed, trial.engine, trial.world, trial.steps, sum(trial.skipped), failures + said, apart, seconds
    )


def trials(seeds: Sequence[int]) -> Iterator[Outcome]:
    """The outcomes of these seeds."""
    for seed in seeds:
        trial = trials_.draw("jax", seed)
        try:
            yield judged(trial)
        except Exception:  # noqa: BLE001  # whatever it is, it is the trial's outcome
            yield trials_.broken(trial, traceback.format_exc()[-2000:])
