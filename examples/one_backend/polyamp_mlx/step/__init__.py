"""One training step: S6 to S14."""
