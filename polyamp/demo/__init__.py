"""Training of the handwritten digits in several frameworks, and the report on the distances of their loss curves."""
