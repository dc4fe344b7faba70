"""Two models with two optimizers that share one scaler: an encoder and a decoder.

With `skip="all"` neither steps when either overflows, and the scale is adjusted once per iteration.

    python examples/two_models.py --framework tensorflow
"""

from __future__ import annotations

from typing import Any

from common import PIXELS, arguments, batches, mlp, report

import polyamp

scaler = polyamp.LossScaler(growth_interval=20)
encoder_recipe = polyamp.Recipe(policy="mixed_float16", scaler=scaler, optimizer=polyamp.adamw(3e-3))
decoder_recipe = polyamp.Recipe(policy="mixed_float16", scaler=scaler, optimizer=polyamp.sgd(0.5, momentum=0.9))


def loss_fn(models: Any, batch: Any) -> Any:
    """Reconstruction error of the pixels."""
    encoder, decoder = models
    return polyamp.losses.mean_squared_error(decoder(encoder(batch["x"])), batch["x"])


def main() -> None:
    """Train and report."""
    args = arguments(__doc__)
    states = [
        polyamp.init(mlp(args.framework, outputs=16), encoder_recipe),
        polyamp.init(mlp(args.framework, inputs=16, outputs=PIXELS), decoder_recipe),
    ]
    value_and_grad = polyamp.value_and_grad(loss_fn)
    losses = []
    for batch in batches(args.steps):
        loss, gradients = value_and_grad(states, batch)
        states, results = polyamp.apply_gradients(states, gradients, skip="all")
        losses.append(loss)
    report(losses[0], losses[-1], updates=[int(r.step) for r in results], scales=[float(r.scale) for r in results])


if __name__ == "__main__":
    main()
