"""Which modules of a model must stay in float32, found by training it, and the numbers that show why."""
