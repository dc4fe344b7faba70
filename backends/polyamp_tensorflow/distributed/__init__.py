"""Replicas of a `tf.distribute` strategy: reductions over them, their processes, and the step on them."""
