"""The metadata store in a PostgreSQL database: many machines, one server in charge."""

from llog.stores.postgres.store import PostgresMetaStore as PostgresMetaStore
