"""The digits run in several frameworks side by side, and the report on how far they part. Called by the commands `demo`
and `parity`; backends and examples take the digits and their model from here."""
