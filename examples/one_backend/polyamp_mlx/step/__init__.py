"""Training step: S6 to S14."""
