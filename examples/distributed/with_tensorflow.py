"""The recipe under TensorFlow's MirroredStrategy.

python examples/distributed/with_tensorflow.py --replicas 2
"""

from __future__ import annotations

import keras
import tensorflow as tf
from problem import CLASSES, HIDDEN, PIXELS, arguments, batches, held_out, loss_fn, recipe, report, weights

import polyamp


def main() -> None:
    """The process is given the whole batch; the strategy divides it among its replicas."""
    options = arguments(__doc__, replicas=2)
    (processor,) = tf.config.list_physical_devices("CPU")  # on a machine with accelerators there is no need
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * options.replicas)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(options.replicas)])
    chosen = recipe(options)
    with strategy.scope():
        layers = [keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((PIXELS,)), *layers])
        for layer, pair in zip(layers, weights(), strict=True):
            layer.set_weights(pair)
        state = polyamp.init(model, chosen)
    step = polyamp.train_step(loss_fn, chosen)
    results = []
    for batch in batches(options.steps):
        state, result = step(state, batch)
        results.append(result)
    logits = chosen.policy.autocast(model)(held_out()[0])
    report(results, logits, f"TensorFlow, MirroredStrategy, {options.replicas} replicas")


if __name__ == "__main__":
    main()
