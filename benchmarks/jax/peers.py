"""Other mixed-precision libraries for JAX, polyamp over each, at equal numerics where they can be had.

On the model of `step`, in float16, each against the polyamp of its kind:

    flax      flax.training.dynamic_scale around the handwritten forward pass         autocast
    jaxamp    jaxamp.amp, an interpreter of jaxprs, and its dynamic scaler            autocast
    grampax   grampax.autocast with flax's DynamicScale                               autocast, add and mul in float32
    jmp       parameters cast as a tree, jmp.DynamicLossScale, jmp.all_finite         cast
    mpx       mixed-precision-for-JAX: arguments cast as a tree, DynamicLossScaling   cast

and Keras on its JAX backend (`keras_peer`). `--only hand` is the handwritten step of `step`, against autocast.
Clipping, AdamW and the choice between old and new state are the handwritten ones for the libraries above. Each note
says what both programs compute in 16 bits, since that is where numerics differ. A library that is not installed, does
not run with this JAX, or does not train, has a row that says so. None is a dependency of polyamp:
`pip install -r benchmarks/jax/requirements.txt`.

Run by hand and by `make bench`; it judges nothing and exits with 0. About a minute and a half on two CPU cores;
`--quick` takes jmp alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.common import paired_timing, results
from benchmarks.common.results import Entry, Side
from benchmarks.jax import keras_peer, measure, transformer
from benchmarks.jax import step as jax_step
from benchmarks.jax.measure import Measured, Settings, Variant


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

LIKE: Final = {
    "hand": "autocast",
    "flax": "autocast",
    "jaxamp": "autocast",
    "grampax": "add,mul float32",
    "jmp": "cast",
    "mpx": "cast",
}
"""Peer -> the polyamp column of its kind."""
_QUICK: Final = ("jmp",)
_TARGET: Final = 1.0
_SETTINGS: Final = Settings(rounds=21, steps=2, compiles=0, curve=5)
_KERAS: Final = paired_timing.Settings(rounds=41, steps=3, seconds=2)


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


def own_variants(names: Sequence[str], variables: Any) -> list[Variant]:
    """polyamp's columns that these peers are compared with."""
    rules = dict.fromkeys(("add", "mul"), "float32")
    made = {
        "autocast": jax_step.library("autocast", variables),
        "cast": jax_step.library("cast", variables, mode="cast"),
        "add,mul float32": jax_step.library("add,mul float32", variables, op_rules=rules),
    }
    return [made[kind] for kind in dict.fromkeys(LIKE[name] for name in names)]


def running(names: Sequence[str], variables: Any, batch: Any) -> tuple[list[Variant], dict[str, str]]:
    """Those of the peers that take a step here, and why the others do not."""
    found, reasons = [], {}
    for name in names:
        if name == "hand":
            found.append(jax_step.handwritten(name, variables, compute=jnp.float16, residual=jnp.float32))
            continue
        try:
            one = variant(name, PEERS[name](), variables)
            jax.eval_shape(one.step(), one.state(), batch)
        except ModuleNotFoundError as error:
            reasons[name] = f"not installed, no module {error.name}: pip install -r benchmarks/jax/requirements.txt"
        except Exception as error:  # noqa: BLE001  # a library may break with a newer JAX in any way
            reasons[name] = f"does not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            found.append(one)
    return found, reasons


def entries(names: Sequence[str], found: Measured, reasons: Mapping[str, str]) -> list[Entry]:
    """A row for each peer."""
    made = []
    for name in names:
        own, title = LIKE[name], "2-layer transformer, float16"
        if name in reasons:
            made.append(
                Entry(
                    section="peers",
                    name=title,
                    unit="s",
                    own=Side(own, []),
                    base=Side(name, []),
                    target=_TARGET,
                    note=reasons[name],
                )
            )
            continue
        row = {"base": name, "own": own, "section": "peers", "target": _TARGET}
        made.append(measure.entry(found, title, **row, note=noted(found, name, own)))
    return made


def noted(found: Measured, name: str, own: str) -> str:
    """Whether a peer trains, and how its numerics differ."""
    losses, skipped = found.curves[name]
    parts = []
    if skipped == len(losses) or not losses[-1] < losses[0]:
        parts.append(f"does not train: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {skipped} steps skipped")
    theirs, ours = (measure.computed(found.programs[one]) for one in (name, own))
    parts.append(f"equal numerics: {ours}" if theirs == ours else f"other numerics: {name} {theirs}; polyamp {ours}")
    return "; ".join(parts)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=None, choices=[*LIKE, "keras"], help="default: all")
    parser.add_argument("--slow", action="store_true", help="also the row that a full run leaves out for its time")
    arguments, settings = measure.parse(parser, default=_SETTINGS)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    chosen = arguments.only or (_QUICK if arguments.quick else [*PEERS, "keras"])
    names = [name for name in chosen if name in LIKE]
    made: list[Entry] = []
    if names:
        batches, variables = transformer.batches(settings.curve), transformer.initial_variables()
        peers, reasons = running(names, variables, batches[0])
        kinds = dict.fromkeys(name for name in names if name not in reasons)
        columns = [*own_variants(list(kinds), variables), *peers]
        found = measure.measure(columns, batches, settings)
        if columns:
            print(measure.report(found, reference=columns[0].name, bases=[columns[0].name]) + "\n", flush=True)
        made += entries(names, found, reasons)
    if "keras" in chosen:
        made += keras_peer.entries(paired_timing.QUICK if arguments.quick else _KERAS, slow=arguments.slow)
    paired_timing.finish(made, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
