"""The metadata store in a PostgreSQL database: many machines, one server in charge."""
