"""Everything that a client does through a broker instead of a log of its own process, over HTTP."""
