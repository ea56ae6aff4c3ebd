"""Processes that DuckDB and the parsers of large texts run in, so that they can be ended: by a limit on their memory,
and by SIGKILL.
"""
