"""Benchmarks: ratios to a named baseline that is measured in the same run. `python -m bench --list` lists them."""
