"""Models in files: polyamp's own safetensors, read and written tensor by tensor, and what else a file may be. Called by
`convert`, `side` and users, and by backends whose frameworks keep models in safetensors."""
