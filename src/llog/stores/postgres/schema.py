"""What llog stores in a PostgreSQL database: three tables and one function, in their own schema.

| table | row |
| --- | --- |
| `llog_entries` | key, value, version, and the session that an ephemeral key belongs to |
| `llog_sessions` | id, and the server's time at which the session ends unless it is renewed |
| `llog_state` | one row: the schema's format, the id of this store, and the revision, which grows with every change and gives versions |

Keys are `bytea`, because `text` refuses NUL and may be collated. All writes go through the function, which takes an
advisory lock first: so writers queue instead of deadlocking, revisions are committed in their order, and one request
does the work of many callers.
"""  # noqa: E501

from __future__ import annotations

import hashlib
from typing import Final

FORMAT: Final = 1
"""The format of the tables and the function. It must grow with every change that an older llog does not understand."""
ANY_VERSION: Final = -2
"""The expected version of an unconditional write. ABSENT is -1."""

PUT: Final = 0
PUT_EPHEMERAL: Final = 1
DELETE: Final = 2
DELETE_RANGE: Final = 3
"""Its value is the end of the range."""
END_SESSION: Final = 4
CONFIRM: Final = 5
"""A write that changes no key: its commit shows that the server is still in charge."""


def notification_channel(schema: str) -> str:
    """Return the channel on which changes are notified."""
    return f"llog_{schema}"


def lock_key(schema: str) -> int:
    """Return the key of the advisory lock that every process takes to create the schema or to write to it."""
    return int.from_bytes(hashlib.sha256(f"llog/{schema}".encode()).digest()[:8], "big", signed=True)


def creation_statement(schema: str) -> str:
    """Return the statement that creates the schema if it does not exist. One statement, so that it is atomic."""
    return f"""
DO $create$
BEGIN
    PERFORM pg_advisory_xact_lock({lock_key(schema)});
    -- Queries, because functions like to_regclass may answer from a cache that is older than the lock.
    PERFORM FROM pg_catalog.pg_tables WHERE schemaname = '{schema}' AND tablename = 'llog_state';
    IF FOUND THEN
        RETURN;
    END IF;
    PERFORM FROM pg_catalog.pg_namespace WHERE nspname = '{schema}';
    IF NOT FOUND THEN
        CREATE SCHEMA {schema};
    END IF;
    CREATE TABLE {schema}.llog_entries (
        key bytea PRIMARY KEY, value bytea NOT NULL, version bigint NOT NULL, session bigint
    ) WITH (fillfactor = 80);
    CREATE INDEX llog_ephemeral ON {schema}.llog_entries (session) WHERE session IS NOT NULL;
    CREATE TABLE {schema}.llog_sessions (id bigint PRIMARY KEY, expires timestamptz NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE {schema}.llog_state (
        id boolean PRIMARY KEY DEFAULT true CHECK (id),
        format integer NOT NULL,
        store uuid NOT NULL,
        revision bigint NOT NULL,
        confirmations bigint NOT NULL
    ) WITH (fillfactor = 50);
    INSERT INTO {schema}.llog_state VALUES (true, {FORMAT}, gen_random_uuid(), 0, 0);
{_apply_function(schema)}
END
$create$
"""


def _apply_function(schema: str) -> str:
    """Return the definition of the function behind every write.

    The function ends sessions that were not renewed, renews the caller's session if `a_renew` is set, and applies the
    operations in order. The result of an operation is the new version; or 1 or 0 if a delete found the key or not; or
    -2 minus the version that was found where another was expected. `a_touched` has the texts to notify, which name the
    keys that may change; the last text is sent with the revision. Without texts, the notification means any key.
    """
    return f"""
    CREATE FUNCTION {schema}.llog_apply(
        a_session bigint, a_timeout_ms bigint, a_renew boolean, a_kinds smallint[], a_keys bytea[], a_values bytea[], a_expected bigint[],
        a_touched text[], OUT o_session bigint, OUT o_results bigint[]
    ) LANGUAGE plpgsql AS $apply$
    DECLARE
        v_now timestamptz;
        v_expires timestamptz;
        v_before bigint;
        v_revision bigint;
        v_touched text[] := a_touched;
        v_kind smallint;
        v_key bytea;
        v_value bytea;
        v_expected bigint;
        v_found bigint;
        v_result bigint;
        v_owner bigint;
    BEGIN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'llog writes with isolation level read committed, not %', current_setting('transaction_isolation');
        END IF;
        PERFORM pg_advisory_xact_lock({lock_key(schema)});
        v_now := clock_timestamp();
        v_expires := v_now + a_timeout_ms * interval '1 millisecond';
        SELECT revision INTO STRICT v_before FROM {schema}.llog_state;
        v_revision := v_before;
        o_session := a_session;
        o_results := '{{}}';

        IF EXISTS (SELECT FROM {schema}.llog_sessions WHERE expires <= v_now) THEN
            WITH ended AS (DELETE FROM {schema}.llog_sessions WHERE expires <= v_now RETURNING id)
            DELETE FROM {schema}.llog_entries USING ended WHERE session = ended.id;
            v_revision := v_revision + 1;
            v_touched := NULL;
        END IF;
        IF a_renew AND o_session IS NOT NULL THEN
            UPDATE {schema}.llog_sessions SET expires = v_expires WHERE id = o_session;
            IF NOT FOUND THEN
                o_session := NULL;
            END IF;
        END IF;

        FOR v_kind, v_key, v_value, v_expected IN SELECT * FROM unnest(a_kinds, a_keys, a_values, a_expected) LOOP
            v_result := 0;
            IF v_kind IN ({PUT}, {PUT_EPHEMERAL}) THEN
                v_owner := NULL;
                IF v_kind = {PUT_EPHEMERAL} THEN
                    IF o_session IS NULL THEN
                        v_revision := v_revision + 1;
                        o_session := v_revision;
                        INSERT INTO {schema}.llog_sessions VALUES (o_session, v_expires);
                    END IF;
                    v_owner := o_session;
                END IF;
                IF v_expected = {ANY_VERSION} THEN
                    INSERT INTO {schema}.llog_entries AS entry VALUES (v_key, v_value, v_revision + 1, v_owner)
                    ON CONFLICT (key) DO UPDATE
                    SET value = excluded.value, version = excluded.version, session = excluded.session;
                ELSIF v_expected = -1 THEN
                    INSERT INTO {schema}.llog_entries VALUES (v_key, v_value, v_revision + 1, v_owner) ON CONFLICT (key) DO NOTHING;
                ELSE
                    UPDATE {schema}.llog_entries SET value = v_value, version = v_revision + 1, session = v_owner
                    WHERE key = v_key AND version = v_expected;
                END IF;
                IF FOUND THEN
                    v_revision := v_revision + 1;
                    v_result := v_revision;
                ELSE
                    SELECT version INTO v_found FROM {schema}.llog_entries WHERE key = v_key;
                    v_result := -2 - coalesce(v_found, -1);
                END IF;
            ELSIF v_kind = {DELETE} THEN
                DELETE FROM {schema}.llog_entries WHERE key = v_key AND (v_expected = {ANY_VERSION} OR version = v_expected);
                IF FOUND THEN
                    v_revision := v_revision + 1;
                    v_result := 1;
                ELSE
                    SELECT version INTO v_found FROM {schema}.llog_entries WHERE key = v_key;
                    v_result := coalesce(-2 - v_found, 0);
                END IF;
            ELSIF v_kind = {DELETE_RANGE} THEN
                DELETE FROM {schema}.llog_entries WHERE key >= v_key AND key < v_value;
                IF FOUND THEN
                    v_revision := v_revision + 1;
                END IF;
            ELSIF v_kind = {END_SESSION} THEN
                DELETE FROM {schema}.llog_entries WHERE session = o_session;
                DELETE FROM {schema}.llog_sessions WHERE id = o_session;
                v_revision := v_revision + 1;
                o_session := NULL;
            ELSE
                UPDATE {schema}.llog_state SET confirmations = confirmations + 1;
            END IF;
            o_results := o_results || v_result;
        END LOOP;

        IF v_revision > v_before THEN
            UPDATE {schema}.llog_state SET revision = v_revision;
            IF coalesce(cardinality(v_touched), 0) = 0 THEN
                PERFORM pg_notify('{notification_channel(schema)}', v_revision::text);
            ELSE
                FOR v_part IN 1 .. cardinality(v_touched) LOOP
                    PERFORM pg_notify(
                        '{notification_channel(schema)}',
                        CASE v_part WHEN cardinality(v_touched) THEN v_revision ELSE 0 END || ' ' || v_touched[v_part]
                    );
                END LOOP;
            END IF;
        END IF;
    END
    $apply$;"""  # noqa: E501
