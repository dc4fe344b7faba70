"""A robot's policy moves from JAX to torch in the middle of its training: port, proof, and the curves of both.

    python examples/robot/robot.py [--steps 300] [--picture curves.png]

A small action-chunking transformer (`jax_policy.py`, `torch_policy.py`) learns to reach for a dot (`arm.py`). JAX
trains it under `robot.toml`; half-way the whole training state goes into torch, and both go on with the same batches.
Beside them run two usual mistakes: LayerNorm epsilon as torch has it, and bfloat16 parameters without masters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch  # before JAX
from arm import Array, batches, reached, scenes
from flax import nnx
from jax_policy import ChunkPolicy
from torch_policy import ActionTransformer

import polyamp

RECIPE = Path(__file__).with_name("robot.toml")
NAMES = {r"pre_attention$": "norm1", r"pre_mlp$": "norm2"}
"""The norms of a block are alike in kind and shape, and their names say nothing in torch."""


def loss_fn(model: Any, batch: Any) -> Any:
    """How far the predicted actions are from the expert's."""
    return polyamp.losses.mean_squared_error(model(batch["image"], batch["joints"]), batch["actions"])


def channels_first(batch: dict[str, Array]) -> dict[str, Array]:
    """The batch as torch's convolutions take it."""
    return {**batch, "image": batch["image"].transpose(0, 3, 1, 2).copy()}


def train(state: Any, recipe: polyamp.Recipe, data: Iterable[dict[str, Array]]) -> tuple[Any, list[float], list[float]]:
    """The state after these batches, the loss of each step, and the loss scale of each."""
    step = polyamp.train_step(loss_fn, recipe)
    losses, scales = [], []
    for batch in data:
        state, result = step(state, batch)
        losses.append(result.loss)
        scales.append(result.scale)
    return state, [float(loss) for loss in losses], [float(scale) for scale in scales]


def go_on(state: Any, recipe: polyamp.Recipe, first: int, steps: int) -> tuple[Any, list[float], list[float]]:
    """In torch: the steps from `first` on, with the batches that JAX has."""
    return train(state, recipe, map(channels_first, batches(steps, first=first)))


def score(model: Any, number: int = 4096) -> float:
    """Percent of new scenes in which the arm reaches the dot."""
    import numpy as np

    scene = scenes(number, np.random.default_rng(99))
    if isinstance(model, nnx.Module):
        return reached(scene, nnx.jit(lambda policy, *x: policy(*x))(model, scene["image"], scene["joints"]))
    own = next(model.parameters()).dtype
    turned = channels_first(scene)
    with torch.no_grad():
        actions = model(*(torch.from_numpy(turned[name]).to(own) for name in ("image", "joints")))
    return reached(scene, actions.float().numpy())


def prove(model: Any) -> None:
    """The port of the weights alone, with what polyamp says on the way."""
    scene = next(batches(1))
    check = scene["image"], scene["joints"]

    for arguments in ({}, {"names": NAMES, "check": check}):
        try:
            polyamp.port(model, ActionTransformer(), **arguments)
        except polyamp.PortError as error:
            print(f"PortError: {error}\n")

    _, report = polyamp.port(model, ActionTransformer(), names=NAMES)
    print(f"{report}\n")

    _, report = polyamp.port(model, ActionTransformer(eps=1e-6), names=NAMES, check=check)
    print(f"{report}\n")


def torch_state(jax_state: Any, recipe: polyamp.Recipe, eps: float = 1e-6) -> tuple[Any, polyamp.porting.PortReport]:
    """The JAX training state in torch: masters, Adam's moments and counts, loss scale, place in the schedule."""
    model = ActionTransformer(eps).to(getattr(torch, recipe.policy.param))
    target = polyamp.init(model, recipe)
    strict = recipe.policy.param == "float32"  # parameters in bfloat16 cannot take float32 masters: they are rounded
    return polyamp.port(jax_state, target, names=NAMES, strict=strict)


def in_bfloat16(steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Losses from step 0 (JAX) or from the middle (torch) on, and how often the arm reaches the dot, by run."""
    half = steps // 2
    recipe = polyamp.Recipe.load(RECIPE)
    jax_state = polyamp.init(ChunkPolicy(nnx.Rngs(0)), recipe)
    jax_state, before, _ = train(jax_state, recipe, batches(half))

    prove(jax_state.model)
    ported, report = torch_state(jax_state, recipe)
    print(f"{report}\n")

    rounded = recipe.replace(policy="bfloat16")  # no masters, as model.bfloat16() has it
    states = {
        "ported": (ported, recipe),
        "epsilon": (torch_state(jax_state, recipe, eps=1e-5)[0], recipe),
        "no masters": (torch_state(jax_state, rounded)[0], rounded),
        "both": (torch_state(jax_state, rounded, eps=1e-5)[0], rounded),
    }
    jax_state, after, _ = train(jax_state, recipe, batches(steps - half, first=half))
    losses, scores = {"JAX": before + after}, {"JAX": score(jax_state.model)}
    for name, (state, its_recipe) in states.items():
        state, losses[name], _ = go_on(state, its_recipe, half, steps - half)
        scores[name] = score(state.model)
    return losses, scores


def in_float16(steps: int) -> str:
    """The same way under `mixed_float16`, where the loss scale moves along; one line."""
    half = steps // 2
    recipe = polyamp.Recipe.load(RECIPE)
    scaler = polyamp.LossScaler(init_scale=2.0**20, growth_interval=max(2, steps // 5))
    recipe = recipe.replace(policy=recipe.policy.replace(compute="float16"), scaler=scaler)
    jax_state, _, _ = train(polyamp.init(ChunkPolicy(nnx.Rngs(0)), recipe), recipe, batches(half))
    ported, _ = torch_state(jax_state, recipe)
    _, losses, scales = train(jax_state, recipe, batches(steps - half, first=half))
    _, others, its_scales = go_on(ported, recipe, half, steps - half)
    far = max(abs(one - other) / one for one, other in zip(losses, others, strict=True))
    return (
        f"float16: loss scales of {steps - half} steps after the port equal {scales == its_scales} "
        f"(from {scales[0]:.0f} to {scales[-1]:.0f}), losses within {far:.1e}"
    )


TITLES = {
    "JAX": "JAX, not interrupted",
    "ported": "torch, ported by polyamp",
    "epsilon": "torch, LayerNorm epsilon 1e-5",
    "no masters": "torch, bfloat16 without masters",
    "both": "torch, both mistakes",
}


def table(losses: dict[str, list[float]], scores: dict[str, float], last: int = 20) -> str:
    """One row a run: the mean loss of the last steps, against JAX's, and the share of dots that were reached."""
    rows = [f"{'run':<34}{f'loss, last {last}':>14}{'to JAX':>9}{'reached':>10}"]
    own = sum(losses["JAX"][-last:])
    for name, values in losses.items():
        mean = sum(values[-last:]) / last
        rows.append(f"{TITLES[name]:<34}{mean:>14.5f}{100 * (last * mean / own - 1):>+8.1f}%{scores[name]:>9.1f}%")
    return "\n".join(rows)


def main() -> None:
    """Train, port, prove, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--float16-steps", type=int, default=40, help="0 leaves this run out")
    parser.add_argument("--picture", type=Path, help="where the curves go (needs matplotlib)")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices, and JAX has threads of its own
    losses, scores = in_bfloat16(args.steps)
    print(table(losses, scores))
    far = max(abs(a - b) / a for a, b in zip(losses["JAX"][args.steps // 2 :], losses["ported"], strict=True))
    print(f"bfloat16: losses of JAX and of torch, ported, within {far:.1e} in every step")
    if args.float16_steps:
        print(in_float16(args.float16_steps))
    if args.picture:
        from curve_plot import draw

        draw(losses, TITLES, args.picture)


if __name__ == "__main__":
    main()
