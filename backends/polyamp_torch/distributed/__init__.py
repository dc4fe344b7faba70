"""Support for torch's parallel engines: detection, adapters, and communication between the processes."""
