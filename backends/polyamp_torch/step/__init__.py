"""A torch model under training, and its step (S6 to S15): differentiate, measure, update; eager or compiled."""
