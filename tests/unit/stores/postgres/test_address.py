from __future__ import annotations

import pytest

from llog.stores.postgres.address import PostgresAddress


@pytest.mark.parametrize(
    ("url", "hosts", "normal"),
    [
        ("postgresql://u@db/d", (("db", 5432),), "postgresql://u@db:5432/d?schema=llog"),
        ("postgres://u@db:1/d?schema=x", (("db", 1),), "postgresql://u@db:1/d?schema=x"),
        ("postgresql://u@a:1,b/d", (("a", 1), ("b", 5432)), "postgresql://u@a:1,b:5432/d?schema=llog"),
        ("postgresql://u@[::1]:7/d", (("::1", 7),), "postgresql://u@[::1]:7/d?schema=llog"),
        (
            "postgresql://u@/d?host=/run/pg&port=6",
            (("/run/pg", 6),),
            "postgresql://u@/d?schema=llog&host=/run/pg&port=6",
        ),
        (
            "postgresql://a%40b@db/my%20d?sslmode=verify-full&sslrootcert=/c/a.pem",
            (("db", 5432),),
            "postgresql://a%40b@db:5432/my%20d?schema=llog&sslmode=verify-full&sslrootcert=/c/a.pem",
        ),
    ],
)
def test_an_address_is_taken_apart_and_written_in_one_way(
    url: str, hosts: tuple[tuple[str, int], ...], normal: str
) -> None:
    address = PostgresAddress.parse(url)
    assert address.hosts == hosts
    assert str(address) == normal
    assert PostgresAddress.parse(normal) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:hunter2@db/d", "LLOG_POSTGRES_PASSWORD"),
        ("postgresql://db/d", "user@host"),
        ("postgresql://u@db", "user@host"),
        ("postgresql://u@db/d/e", "user@host"),
        ("postgresql://u@/d", "host once"),
        ("postgresql://u@db/d?host=/run", "host once"),
        ("postgresql://u@db:0/d", "port is '0'"),
        ("postgresql://u@db:99999/d", "port is '99999'"),
        ("postgresql://u@a:b:c/d", "host:port"),
        ("postgresql://u@db/d?schema=Robert'); DROP", "schema"),
        ("postgresql://u@db/d?schema=pg_x", "schema"),
        ("postgresql://u@db/d?sslmode=maybe", "sslmode is 'maybe': write one of"),
        ("postgresql://u@db/d?password=hunter2", "'password' is unknown"),
        ("postgresql://u@db/d?hunter2", "name=value"),
    ],
)
def test_a_wrong_address_is_refused_with_the_right_form_and_without_secrets(url: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        PostgresAddress.parse(url)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)
