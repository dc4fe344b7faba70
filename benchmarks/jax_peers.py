"""Other mixed-precision libraries for JAX on the model and with the measurements of `jax_step`, beside polyamp.

    flax      flax.training.dynamic_scale around the handwritten forward pass (flax casts nothing by itself)
    jmp       parameters cast as a tree, jmp.DynamicLossScale, jmp.all_finite: compare with mode "cast"
    mpx       mixed-precision-for-JAX: arguments cast as a tree, its DynamicLossScaling: compare with mode "cast"
    jaxamp    jaxamp.amp, an interpreter of jaxprs, and its dynamic scaler: compare with mode "autocast"
    grampax   grampax.autocast with flax's DynamicScale: compare with mode "autocast"

Clipping, AdamW and the choice between old and new state are the handwritten ones everywhere. The row of dots tells
how much of the model a library really computes in float16. A library that is not installed, or does not run with this
JAX, is left out and named; none is a dependency of polyamp, so install them where you want to see them
(`pip install jmp mixed-precision-for-JAX jaxamp grampax "quax<0.4"`). Run by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import jax_measure
import jax_step
import jax_transformer as transformer
import optax
from jax_measure import Variant


class PeerState(NamedTuple):
    """State of a peer's step: float32 master weights, AdamW's state, and the library's own scaler."""

    params: Any
    opt_state: Any
    scaler: Any


Gradients = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]
"""`(scaler, params, batch) -> (loss, unscaled float32 gradients, finite, new scaler)`: a library's part of a step."""


class Peer(NamedTuple):
    """A library's part of a step, and the scaler to begin with."""

    gradients: Gradients
    scaler: Any


def plain_loss(params: Any, batch: Any) -> Any:
    """The loss of the linen model, without a cast in the model; the logits are widened, as every library advises."""
    logits = transformer.Transformer().apply({"params": params}, batch["x"])
    return cross_entropy(logits, batch["y"])


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean loss in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def flax_peer(loss: Any = None) -> Peer:
    """flax's DynamicScale; `loss` is the handwritten one by default."""
    module: Any = importlib.import_module("flax.training.dynamic_scale")

    def by_hand(params: Any, batch: Any) -> Any:
        logits = transformer.forward(params, batch["x"], compute=jnp.float16, residual=jnp.float32)
        return cross_entropy(logits, batch["y"])

    def gradients(scaler: Any, params: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        scaler, finite, value, grads = scaler.value_and_grad(loss or by_hand)(params, batch)
        return value, grads, finite, scaler

    return Peer(gradients, module.DynamicScale(scale=jnp.float32(transformer.INITIAL_SCALE), fin_steps=jnp.int32(0)))


def jmp_peer() -> Peer:
    """jmp as its README has it; its scaler travels as a pair, since `jax.jit(f).lower` cannot take it as it is."""
    jmp: Any = importlib.import_module("jmp")
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def gradients(pair: Any, params: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        scaler = jmp.DynamicLossScale(*pair)

        def scaled_loss(params: Any) -> tuple[Any, Any]:
            value = plain_loss(policy.cast_to_compute(params), batch)
            return scaler.scale(value), value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        grads = scaler.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        after = scaler.adjust(finite)
        return value, grads, finite, (after.loss_scale, after.counter)

    return Peer(gradients, (jnp.float32(transformer.INITIAL_SCALE), jnp.int32(0)))


def mpx_peer() -> Peer:
    """mixed-precision-for-JAX, whose module is called mpx."""
    mpx: Any = importlib.import_module("mpx")

    def gradients(scaler: Any, params: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        value, scaler, finite, grads = mpx.filter_value_and_grad(plain_loss, scaler)(params, batch)
        return value, grads, finite, scaler

    return Peer(gradients, mpx.DynamicLossScaling(jnp.float32(transformer.INITIAL_SCALE), jnp.float32(1.0)))


def jaxamp_peer() -> Peer:
    """jaxamp, without its repetition of steps that overflowed."""
    jaxamp: Any = importlib.import_module("jaxamp")

    def gradients(scaler: Any, params: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        loss = jaxamp.amp(plain_loss, compute_dtype=jnp.float16)
        differentiated = jaxamp.dynamic_scale_value_and_grad(loss, redo_on_nan=0, filter=False)
        after, (value, grads) = differentiated(params, batch, dynamic_scaler_state=scaler)
        return value, grads, after.total_resets == scaler.total_resets, after

    return Peer(gradients, jaxamp.DynamicScalerState(scaler=jnp.float32(transformer.INITIAL_SCALE)))


def grampax_peer() -> Peer:
    """grampax, which has no loss scaler of its own. Its version 0.1.0 prints arrays while it traces."""
    grampax: Any = importlib.import_module("grampax")
    peer = flax_peer(grampax.autocast(plain_loss, dtype=jnp.float16))

    def gradients(scaler: Any, params: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        with contextlib.redirect_stdout(io.StringIO()):
            return peer.gradients(scaler, params, batch)

    return peer._replace(gradients=gradients)


PEERS: Final[dict[str, Callable[[], Peer]]] = {
    "flax": flax_peer,
    "jmp": jmp_peer,
    "mpx": mpx_peer,
    "jaxamp": jaxamp_peer,
    "grampax": grampax_peer,
}


def variant(name: str, peer: Peer, variables: Any) -> Variant:
    """A peer as a column of the table."""
    optimizer = transformer.adamw()

    def state() -> PeerState:
        params, scaler = jax.tree.map(jnp.copy, (variables["params"], peer.scaler))
        return PeerState(params, optimizer.init(params), scaler)

    return Variant(name, state, lambda: peer_step(peer.gradients, optimizer), lambda output: output)


def peer_step(gradients: Gradients, optimizer: optax.GradientTransformation) -> Any:
    """A fresh jitted step around a library's part: `state, (loss, finite) = step(state, batch)`."""

    def step(state: PeerState, batch: Any) -> tuple[PeerState, tuple[Any, Any]]:
        loss, grads, finite, scaler = gradients(state.scaler, state.params, batch)
        norm = optax.global_norm(grads)
        factor = transformer.CLIP_NORM / jnp.maximum(norm, transformer.CLIP_NORM)
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * factor, grads), state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), opt_state)
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, state[:2])
        return PeerState(params, opt_state, scaler), (loss, finite)

    return jax.jit(step, donate_argnums=0)


def running(names: Sequence[str], batch: Any) -> list[Variant]:
    """Those of the peers that take a step here; says which do not, and why."""
    variables, found = transformer.initial_variables(), []
    for name in names:
        try:
            one = variant(name, PEERS[name](), variables)
            jax.eval_shape(one.step(), one.state(), batch)
        except ModuleNotFoundError as error:
            print(f"{name} is left out: not installed ({error.name})", flush=True)
        except Exception as error:  # noqa: BLE001  # a library may break with a newer JAX in any way
            print(f"{name} is left out: it fails with {type(error).__name__}: {error}", flush=True)
        else:
            found.append(one)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=["cast", "autocast"], help="polyamp's modes (default: both)")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), help="default: all")
    parser.add_argument(
        "--float32",
        nargs="*",
        default=[],
        metavar="OPS",
        help="op_rules: a column of polyamp's autocast for each, with "
        "these primitives in float32 ('add', 'add,mul'), for peers that run more in float32",
    )
    arguments, settings = jax_measure.parse(parser)
    print(jax_measure.heading(settings), flush=True)
    batches = transformer.batches(settings.curve)
    own = jax_step.variants(arguments.modes, with_optax=False)
    for primitives in arguments.float32:
        rules = dict.fromkeys(primitives.split(","), "float32")
        own.append(jax_step.library(primitives, transformer.initial_variables(), mode="autocast", op_rules=rules))
    results = jax_measure.measure([*own, *running(arguments.peers, batches[0])], batches, settings)
    print(jax_measure.report(results, reference="float32", bases=["hand", "hand-f16"]))
    if arguments.json:
        jax_measure.write_json(arguments.json, results, settings)


if __name__ == "__main__":
    main()
