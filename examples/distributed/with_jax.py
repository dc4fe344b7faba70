"""The recipe on a mesh of JAX's devices: the batch is sharded over it, and `jax.jit` divides the work.

python examples/distributed/with_jax.py --replicas 2

With `--shard` the first kernel and its optimizer state are sharded too. Several processes: the same program in each,
with `--coordinator localhost:12355 --processes 2 --process 0` in the first and `--process 1` in the second.
"""

from __future__ import annotations

import os
from typing import Any

from problem import arguments, batches, held_out, loss_fn, recipe, report, weights


def main() -> None:
    """Every process gives its own part of every batch; together they are one global array."""
    options = arguments(__doc__, replicas=2, shard=False, coordinator="", processes=1, process=0)
    here = options.replicas // options.processes
    forced = f"--xla_force_host_platform_device_count={here}"  # on a machine with accelerators there is no need
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {forced}"

    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import polyamp

    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    mesh = jax.make_mesh((options.replicas,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))
    placed = [jax.device_put(pair, everywhere) for pair in weights()]
    if options.shard:
        placed[0] = (jax.device_put(weights()[0][0], by_rows), placed[0][1])

    def apply_fn(params: Any, x: Any) -> Any:
        (first, bias), (second, last) = params
        return jax.nn.relu(x @ first + bias) @ second + last

    chosen = recipe(options)
    state = polyamp.init((apply_fn, placed), chosen)
    step = polyamp.train_step(loss_fn, chosen)
    results = []
    for part in batches(options.steps, options.process, options.processes):
        batch = {name: jax.make_array_from_process_local_data(by_rows, rows) for name, rows in part.items()}
        state, result = step(state, batch)
        results.append(result)
    logits = jax.device_put(chosen.policy.autocast(state.model)(held_out()[0]), everywhere)
    if options.process == 0:
        report(results, logits, f"JAX, NamedSharding, {options.replicas} devices, {options.processes} processes")


if __name__ == "__main__":
    main()
