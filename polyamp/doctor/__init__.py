"""What mixed precision does on the devices here: measurements of each dtype, verdicts, and a recommended policy."""
