"""Deterministic simulation: the code that ships, on virtual time, under crashes, stalls and lost answers."""
