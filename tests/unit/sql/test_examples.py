"""A walk through durable topics as their users write it: statements in the form that the documentation shows, run as
they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llog.config import Settings
from llog.errors import InvalidArgument
from llog.log.opening import opened_log
from llog.model import partition_for_key
from llog.sql.database import Database
from llog.sql.session import DatabaseSession

TABLE = """
CREATE TABLE chat.messages (
  user_id VARCHAR NOT NULL,
  thread_id BIGINT,
  seq BIGINT,
  body VARCHAR,
  PRIMARY KEY (user_id, thread_id, seq)
);
"""


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[DatabaseSession]:
    settings = Settings(data_dir=str(tmp_path))
    async with opened_log(settings) as log:
        database = Database(log, settings)
        await database.start()
        opened = database.session()
        yield opened
        await opened.close()
        await database.close()


async def run(session: DatabaseSession, text: str) -> list[dict[str, Any]]:
    """The rows of the last statement."""
    table = (await session.execute(text))[-1].table
    return [] if table is None else table.to_pylist()


async def write(session: DatabaseSession, count: int, user: str | None = None) -> None:
    """Rows of one user, or each of another."""
    rows = pa.table(
        {
            "user_id": [user or f"user-{number}" for number in range(count)],
            "thread_id": pa.array([1] * count, pa.int64()),
            "seq": pa.array(range(count), pa.int64()),
            "body": ["hello"] * count,
        }
    )
    assert (await session.insert("chat.messages", rows)).changed == count


async def test_a_topic_and_a_partitioned_one(session: DatabaseSession) -> None:
    await run(session, "CREATE TOPIC app.new_messages;")
    assert [(row["topic"], row["partitions"]) for row in await run(session, "SHOW TOPICS")] == [("app.new_messages", 1)]
    await run(session, "DROP TOPIC app.new_messages")
    await run(session, "CREATE TOPIC app.new_messages\nPARTITIONS 8;")
    assert [(row["topic"], row["partitions"]) for row in await run(session, "SHOW TOPICS")] == [("app.new_messages", 8)]


async def test_routes_with_a_reference_a_snapshot_and_a_partition_key(session: DatabaseSession) -> None:
    await run(session, TABLE + "CREATE TOPIC app.new_messages PARTITIONS 8;")
    await run(session, "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nWITH (payload = 'key');")
    await write(session, 1, "ann")
    [event] = await run(session, "CONSUME FROM app.new_messages GROUP 'g' FROM EARLIEST LIMIT 10")
    assert event["payload"] == '{"user_id":"ann","thread_id":1,"seq":0}'
    assert (event["op"], event["payload_mode"], event["source_table"]) == ("INSERT", "key", "chat.messages")

    await run(session, "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nWITH (payload = 'full');")
    await write(session, 1, "bob")
    [event] = await run(session, "CONSUME FROM app.new_messages GROUP 'g' LIMIT 10")
    assert event["payload"] == '{"user_id":"bob","thread_id":1,"seq":0,"body":"hello"}'

    await run(
        session,
        "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nPARTITION BY (user_id)\nWITH (payload "
        "= 'key');",
    )
    await write(session, 20, "cyd")
    events = await run(session, "CONSUME FROM app.new_messages GROUP 'g' LIMIT 100")
    assert [event["partition"] for event in events] == [partition_for_key(b"cyd", 8)] * 20
    assert len(await run(session, "SHOW ROUTES")) == 1


async def test_start_positions(session: DatabaseSession) -> None:
    await run(
        session,
        TABLE + "CREATE TOPIC app.new_messages; ALTER TOPIC app.new_messages ADD SOURCE chat.messages ON INSERT",
    )
    await write(session, 12_400)
    assert await run(session, "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM LATEST\nLIMIT 100;") == []
    await write_more(session, 12_400, 3)
    found = await run(session, "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM LATEST\nLIMIT 100;")
    assert [row["offset"] for row in found] == [12_401, 12_402, 12_403]
    found = await run(session, "CONSUME FROM app.new_messages\nGROUP 'other-service'\nFROM EARLIEST\nLIMIT 100;")
    assert [row["offset"] for row in found] == list(range(1, 101))
    found = await run(session, "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM OFFSET 12345\nLIMIT 100;")
    assert [row["offset"] for row in found] == list(range(12_345, 12_404))
    found = await run(session, "CONSUME FROM app.new_messages GROUP 'ai-service' FROM AFTER 12400 LIMIT 100")
    assert [row["offset"] for row in found] == [12_401, 12_402, 12_403]


async def test_a_group_that_begins_with_the_earliest_message(session: DatabaseSession) -> None:
    await run(
        session,
        TABLE + "CREATE TOPIC app.new_messages; ALTER TOPIC app.new_messages ADD SOURCE chat.messages ON INSERT",
    )
    await write(session, 250)
    earliest = "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM EARLIEST\nLIMIT 100;"
    pages = [[row["offset"] for row in await run(session, earliest)] for _ in range(4)]
    assert pages == [list(range(1, 101)), list(range(101, 201)), list(range(201, 251)), []]


async def write_more(session: DatabaseSession, first: int, count: int) -> None:
    rows = ", ".join(f"('late', 1, {number})" for number in range(first, first + count))
    await session.execute(f"INSERT INTO chat.messages (user_id, thread_id, seq) VALUES {rows}")


async def test_acknowledging_one_partition_and_several(session: DatabaseSession) -> None:
    await run(session, TABLE + "CREATE TOPIC app.new_messages PARTITIONS 8;")
    await run(session, "ALTER TOPIC app.new_messages ADD SOURCE chat.messages ON INSERT")
    await write(session, 9_000)
    found = await run(
        session, "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nPARTITION 3\nFROM OFFSET 120\nLIMIT 100;"
    )
    assert [(row["partition"], row["offset"]) for row in found] == [(3, offset) for offset in range(120, 220)]
    [acked] = await run(session, "ACK app.new_messages\nGROUP 'ai-service'\nPARTITION 3\nUPTO OFFSET 220;")
    assert (acked["partition"], acked["next_offset"]) == (3, 221)
    acked_both = await run(
        session,
        "ACK app.new_messages\nGROUP 'ai-service'\nUPTO (\n  PARTITION 0 OFFSET 991,\n  PARTITION 1 OFFSET 410\n);",
    )
    assert [(row["partition"], row["next_offset"]) for row in acked_both] == [(0, 992), (1, 411)]
    with pytest.raises(InvalidArgument, match="PARTITION"):
        await run(session, "ACK app.new_messages GROUP 'ai-service' UPTO OFFSET 5")


async def test_end_to_end(session: DatabaseSession) -> None:
    await run(session, TABLE + "CREATE TOPIC app.new_messages PARTITIONS 4;")
    await run(session, "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nPARTITION BY (user_id);")
    latest = "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM LATEST\nLIMIT 100;"
    assert await run(session, latest) == []
    await write(session, 2_600)
    seen = 0
    while found := await run(session, latest):
        seen += len(found)
        row = (await run(session, "SELECT body FROM chat.messages WHERE user_id = 'user-7'"))[0]
        assert row == {"body": "hello"}
    assert seen == 2_600
    [acked] = await run(session, "ACK app.new_messages\nGROUP 'ai-service'\nPARTITION 2\nUPTO OFFSET 551;")
    assert acked["next_offset"] == 552
    [offsets] = await run(
        session,
        """SELECT last_acked_offset, "group" FROM system.topic_offsets WHERE partition = 2""",
    )
    assert offsets == {"last_acked_offset": 551, "group": "ai-service"}
