"""The bench of a broker: a process of its own, whose load comes from this one, beside peers and bare baselines."""
