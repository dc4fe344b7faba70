"""polyamp in other libraries' training loops: Lightning and Accelerate."""
