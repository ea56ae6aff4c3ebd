"""Worker processes for DuckDB and for parsing long texts, which a memory limit or a SIGKILL can end."""
