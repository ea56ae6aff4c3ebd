"""Consumer groups of Kafka clients: the classic group protocol, and committed offsets."""
