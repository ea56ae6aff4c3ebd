"""An executable specification of the log's protocols: every interleaving of small configurations is searched."""
