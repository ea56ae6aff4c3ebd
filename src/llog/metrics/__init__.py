"""What every process that exports metrics shares: families, samples, and both forms of the answer."""
