"""How a Keras model's training is watched: this framework's half of `polyamp.compare`.

`observer` is the door; `working` lends a model and puts it back, `still` takes the randomness out of it, `watching`
shows what its layers give.
"""
