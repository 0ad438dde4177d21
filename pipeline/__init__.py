"""duetasks: a reliable delay queue on Kafka."""
