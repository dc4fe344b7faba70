"""Models in files: polyamp's safetensors files, read and written tensor by tensor, and detection of other formats."""
