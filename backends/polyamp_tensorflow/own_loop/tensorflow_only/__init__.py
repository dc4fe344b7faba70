"""What only Keras needs of a loop: `compile` and `guard` for `fit`, accumulation, running statistics."""
