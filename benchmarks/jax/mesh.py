"""What a step sends over a mesh of many devices: counted in the compiled program, which is not run.

    python benchmarks/jax/mesh.py [--devices 64] [--layers 4] [--width 512] [--json]

The devices are forced ones of one CPU, so this says what XLA's SPMD partitioner makes of the program, not how long it
takes. Three programs of one training (a stack of residual blocks, AdamW, clipping by the global norm) are compared for
each way to lay the parameters: by hand without clipping, by hand with `optax.clip_by_global_norm`, and polyamp's.
Arrays are counted, not operations: XLA puts several into one. In the table of `docs/measurements/data/replicas.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

KINDS: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES: Final = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "pred": 1}
ROWS: Final = 4
"""For each device."""


def sent(text: str) -> dict[str, tuple[int, int]]:
    """Kind of collective -> (arrays, bytes of their results on one device) in a compiled program."""
    arrays: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for match in re.finditer(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(", text):
        for dtype, shape in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1]):
            arrays[match[2]] += 1
            sizes[match[2]] += BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size)
    return {kind: (arrays[kind], sizes[kind]) for kind in KINDS if arrays[kind]}


def measured(devices: int, layers: int, width: int) -> dict[str, Any]:
    """All programs on a mesh of so many devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import polyamp
    from polyamp.contract import registry

    side = math.isqrt(devices)
    if jax.device_count() != devices or side * side != devices:
        raise SystemExit(f"--devices must be a square number of forced devices. Received: {jax.device_count()}.")
    mesh = jax.make_mesh((side, side), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    both = ("data", "model")
    specs: dict[str, tuple[Callable[[tuple[int, ...]], Any], Any]] = {
        "replicated (data parallel)": (lambda shape: P(), P(both)),
        "sharded over all devices (FSDP)": (lambda shape: P(both) if len(shape) == 2 else P(), P(both)),
        "data and tensor (2D)": (lambda shape: P("data", "model") if len(shape) == 2 else P(), P("data")),
    }

    def apply_fn(params: Any, x: Any) -> Any:
        for layer in params:
            x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
        return x

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    shapes = [{"up": (width, width), "bias": (width,), "down": (width, width)} for _ in range(layers)]
    found: dict[str, Any] = {}
    for name, (spec, rows) in specs.items():

        def put(array: Any, spec: Any = spec) -> Any:
            return jax.device_put(array, NamedSharding(mesh, spec(array.shape)))

        params = jax.tree.map(lambda s: put(np.zeros(s, np.float32)), shapes, is_leaf=lambda s: isinstance(s, tuple))
        data = np.zeros((ROWS * devices, width), np.float32)
        batch = jax.device_put({"x": data, "y": data}, NamedSharding(mesh, rows))
        programs: dict[str, Any] = {}
        for label, clip in (("by hand", ()), ("by hand, clipped", (optax.clip_by_global_norm(1.0),))):
            optimizer = optax.chain(*clip, optax.adamw(1e-3))
            opt_state = jax.tree.map(lambda leaf: put(leaf) if leaf.ndim == 0 else leaf, optimizer.init(params))
            places = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))

            def hand(params: Any, opt_state: Any, batch: Any, optimizer: Any = optimizer) -> Any:
                value, grads = jax.value_and_grad(loss)(params, batch)
                updates, opt_state = optimizer.update(grads, opt_state, params)
                return optax.apply_updates(params, updates), opt_state, value

            compiled = jax.jit(hand, donate_argnums=(0, 1), out_shardings=(*places, NamedSharding(mesh, P())))
            programs[label] = compiled.lower(params, opt_state, batch).compile()
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
        state = polyamp.init((apply_fn, params), recipe)
        run: Any = registry.get("jax").train_step(
            lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2), recipe
        )
        programs["polyamp"] = run.lower(state, batch).compile()
        found[name] = {label: sent(program.as_text()) for label, program in programs.items()}
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=64, help="a square number (default: 64)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={given.devices}"
    ).strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    found = measured(given.devices, given.layers, given.width)
    if given.json:
        print(json.dumps(found))
        return
    size = f"{given.layers} blocks of 2 x {given.width}^2 + {given.width} float32 parameters"
    print(f"{given.devices} devices, {size}; arrays (bytes of them on each device)")
    for name, programs in found.items():
        print(f"\n{name}")
        for label, counts in programs.items():
            parts = ", ".join(f"{kind} {arrays} ({size:,})" for kind, (arrays, size) in counts.items())
            print(f"  {label:18s} {parts}")


if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[2])]  # this folder is not a package of its own
    main()
