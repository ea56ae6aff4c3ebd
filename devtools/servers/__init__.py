"""Real servers for tests and benchmarks, each a context manager on free loopback ports."""
