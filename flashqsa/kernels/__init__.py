"""Kernel sets: one folder per family of devices, all with the same stages and the same values."""
