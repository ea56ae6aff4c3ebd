"""The Kafka protocol, served by a broker on a port of its own."""
