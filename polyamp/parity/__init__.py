"""Two trainings of a user's own model, in two frameworks or in one, compared array by array; where they part is said.

`polyamp.compare` does it in one process. Here are its parts: `observing` is what a backend gives, `sketch` and `trace`
what is kept of a run, `report` what is found.
"""
