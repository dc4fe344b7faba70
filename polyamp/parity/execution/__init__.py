"""Running a comparison: participants, worker processes and the messages between them."""
