"""What two models compute, and how far apart: a judge of ports that shares no code with `polyamp.port`.

Each model is called as its own library calls it. Gradients of the parameters are compared without knowing which is
which: all values of all gradients, sorted. If two models have the same gradients, whatever their layouts, the sorted
values are the same, and the largest difference between sorted values is at most the one between values in any order.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from tests.porting.public.zoo.case import Array, Batch, Case, channels_first, channels_last

SEED: Final = 7


class Played(NamedTuple):
    """A model's outputs, gradients of its float inputs, and values of all gradients of its parameters."""

    outputs: list[Array]
    inputs: list[Array]
    parameters: Array


class Distance(NamedTuple):
    """Relative errors: the largest difference over the largest value."""

    outputs: float
    gradients: float


def distance(case: Case, source: Any, target: Any, seed: int = SEED) -> Distance:
    """The errors of a target on a batch that no check has seen."""
    batch = case.batch(np.random.default_rng(seed))
    rng = np.random.default_rng(seed + 1)
    drawn: list[Array] = []

    def ours(shapes: list[tuple[int, ...]]) -> list[Array]:
        drawn[:] = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        return drawn

    turn = channels_first if is_torch(target) else channels_last
    if case.native(batch)[0].shape == batch[0].shape:
        turn = np.asarray

    def theirs(shapes: list[tuple[int, ...]]) -> list[Array]:
        turned = [turn(each) for each in drawn]
        if [each.shape for each in turned] != [tuple(shape) for shape in shapes]:
            raise ValueError(f"outputs are {[each.shape for each in turned]} and {shapes}")
        return turned

    one, two = play(source, batch, ours), play(target, case.native(batch), theirs, case.own_parameters)
    outputs = max(relative(turn(a), b) for a, b in zip(one.outputs, two.outputs, strict=True))
    wanted = [array for array in case.native(one_tree(batch, one.inputs)) if array.dtype.kind == "f"]
    gradients = [relative(a, b) for a, b in zip(wanted, two.inputs, strict=True)]
    return Distance(outputs, max([*gradients, relative(*alike(one.parameters, two.parameters))]))


def one_tree(batch: Batch, gradients: list[Array]) -> Batch:
    """The batch with gradients in the place of its float inputs."""
    rest = iter(gradients)
    return tuple(next(rest) if array.dtype.kind == "f" else array for array in batch)


def alike(one: Array, two: Array) -> tuple[Array, Array]:
    """Sorted values of both, the shorter one with zeros: parameters that do nothing have zero gradients."""
    size = max(one.size, two.size)
    return np.sort(np.pad(one, (0, size - one.size))), np.sort(np.pad(two, (0, size - two.size)))


def relative(one: Array, two: Array) -> float:
    """The largest difference over the largest value; infinite where one is not finite."""
    if one.size == 0:
        return 0.0
    error = float(np.max(np.abs(one - two)) / max(float(np.max(np.abs(one))), 1e-30))
    return error if np.isfinite(error) else float("inf")


def is_torch(model: Any) -> bool:
    """Whether it is a torch module."""
    return "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module)


def is_keras(model: Any) -> bool:
    """Whether it is a Keras model."""
    return "keras" in sys.modules and isinstance(model, sys.modules["keras"].Model)


Cotangents = Callable[[list[tuple[int, ...]]], list[Array]]


def play(model: Any, batch: Batch, cotangents: Cotangents, without: str = "") -> Played:
    """Run a model of any library forward and backward, as in inference. The gradients of a Keras model's parameters
    whose paths match `without` are left out."""
    if is_torch(model):
        return _play_torch(model, batch, cotangents)
    if is_keras(model):
        return _play_keras(model, batch, cotangents, without)
    if without:
        raise ValueError("parameters are left out of Keras models alone")
    return _play_jax(model, batch, cotangents)


def flat(outputs: Any) -> list[Any]:
    """The arrays of an output, in order."""
    if hasattr(outputs, "to_tuple"):
        outputs = outputs.to_tuple()
    if isinstance(outputs, dict):
        outputs = [outputs[key] for key in sorted(outputs)]
    return [each for one in outputs for each in flat(one)] if isinstance(outputs, (list, tuple)) else [outputs]


def _play_torch(model: Any, batch: Batch, cotangents: Cotangents) -> Played:
    """Of a recurrent layer's two biases, which are added and so have the same gradient, one is enough."""
    import torch

    model.eval()
    inputs = [torch.tensor(array, requires_grad=array.dtype.kind == "f") for array in batch]
    outputs = flat(model(*inputs))
    weights = [torch.tensor(each) for each in cotangents([tuple(each.shape) for each in outputs])]
    loss = sum((a * b).sum() for a, b in zip(outputs, weights, strict=True))
    floats = [each for each in inputs if each.requires_grad]
    leaves = [each for name, each in model.named_parameters() if each.requires_grad and ".bias_hh" not in name]
    found = torch.autograd.grad(loss, [*floats, *leaves], allow_unused=True)  # type: ignore[arg-type]
    given = [
        np.zeros(leaf.shape) if g is None else g.numpy() for leaf, g in zip([*floats, *leaves], found, strict=True)
    ]
    parameters = np.concatenate([each.ravel() for each in given[len(floats) :]])
    return Played([each.detach().numpy() for each in outputs], given[: len(floats)], parameters)


def _play_keras(model: Any, batch: Batch, cotangents: Cotangents, without: str) -> Played:
    import tensorflow as tf

    inputs = [tf.constant(array) for array in batch]
    floats = [each for each in inputs if each.dtype.is_floating]
    leaves = [each for each in model.trainable_variables if not without or not re.search(without, each.path)]
    with tf.GradientTape() as tape:
        tape.watch(floats)
        outputs = flat(model(inputs[0] if len(inputs) == 1 else inputs, training=False))
        weights = cotangents([tuple(each.shape) for each in outputs])
        loss = sum(tf.reduce_sum(a * b) for a, b in zip(outputs, weights, strict=True))
    found = tape.gradient(loss, [*floats, *(each.value for each in leaves)])
    dense = [np.zeros(leaf.shape) if g is None else tf.convert_to_tensor(g).numpy()
             for leaf, g in zip([*floats, *leaves], found, strict=True)]  # fmt: skip
    parameters = np.concatenate([each.ravel() for each in dense[len(floats) :]])
    return Played([each.numpy() for each in outputs], dense[: len(floats)], parameters)


def _play_jax(model: Any, batch: Batch, cotangents: Cotangents) -> Played:
    import jax
    import jax.numpy as jnp

    function, parameters = jax_function(model)
    floats = {number: jnp.asarray(array) for number, array in enumerate(batch) if array.dtype.kind == "f"}

    def run(parameters: Any, floats: Any) -> Any:
        return flat(function(parameters, *(floats.get(n, array) for n, array in enumerate(batch))))

    shapes = jax.eval_shape(run, parameters, floats)
    weights = cotangents([tuple(each.shape) for each in shapes])

    @jax.jit
    def both(parameters: Any, floats: Any) -> Any:
        outputs, back = jax.vjp(run, parameters, floats)
        return outputs, back([jnp.asarray(each) for each in weights])

    outputs, (of_parameters, of_inputs) = both(parameters, floats)
    values = [np.asarray(each).ravel() for each in jax.tree.leaves(of_parameters)]
    return Played([np.asarray(each) for each in outputs], [np.asarray(of_inputs[n]) for n in floats],
                  np.concatenate(values))  # fmt: skip


def jax_function(model: Any) -> tuple[Callable[..., Any], Any]:
    """(function of parameters and a batch, parameters) of a model of linen, haiku, nnx or equinox."""
    import equinox as eqx
    import haiku as hk
    import jax
    from flax import linen, nnx

    if isinstance(model, tuple) and isinstance(model[0], linen.Module):
        module, variables = model
        rest = {name: each for name, each in variables.items() if name != "params"}
        options = {"train": False} if "train" in inspect.signature(type(module).__call__).parameters else {}
        return lambda params, *batch: module.apply({"params": params, **rest}, *batch, **options), variables["params"]
    if isinstance(model, tuple) and isinstance(model[0], hk.TransformedWithState):
        transformed, (params, state) = model
        return lambda params, *batch: transformed.apply(params, state, *batch, is_training=False)[0], params
    if isinstance(model, tuple):
        transformed, params = model
        return lambda params, *batch: transformed.apply(params, *batch), params
    if isinstance(model, nnx.Module):
        model.eval()
        graph, params, others = nnx.split(model, nnx.Param, ...)
        return lambda params, *batch: nnx.merge(graph, params, others)(*batch), params
    params, others = eqx.partition(model, eqx.is_inexact_array)
    return lambda params, *batch: jax.vmap(eqx.combine(params, others))(*batch), params
