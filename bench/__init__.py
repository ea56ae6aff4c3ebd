"""Benchmarks: ratios against a named baseline measured in the same run. `python -m bench --list` says which there
are.
"""
