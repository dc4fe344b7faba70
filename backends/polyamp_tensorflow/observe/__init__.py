"""Observation of a Keras model's training, for `polyamp.compare`.

`observer` is the entry point. `model_copy` restores a model afterwards, `dropout` controls its randomness, and
`capture` reports the outputs of its layers.
"""
