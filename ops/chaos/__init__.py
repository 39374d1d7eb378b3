"""Faults on purpose, each against a real stack of its own, and the proof that nothing of them shows: `sluice chaos`."""
