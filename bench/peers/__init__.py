"""Other logs that can be had from registries, started beside llog for comparison, each on free loopback ports."""
