"""torch's half of moving models to other frameworks; `converter` is its door."""
