"""torch's own engines, as polyamp finds them: which one holds a model, and what the processes tell each other."""
