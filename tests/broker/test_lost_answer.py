"""What the answer to a consume carried is delivered again if the answer was lost, whatever is acknowledged
meanwhile.
"""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import pytest

import llog
from tests.broker.test_process import running


def test_records_of_a_lost_answer_are_not_acknowledged_with_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, "serve") as broker, llog.connect(str(broker.client.base_url)) as connection:
        connection.execute("CREATE TOPIC app.jobs")
        connection.execute("INSERT INTO TOPIC app.jobs (payload) SELECT 'job ' || i FROM range(20) t(i)")
        answers: list[http.client.HTTPResponse] = []
        read = http.client.HTTPConnection.getresponse

        def lost_once(self: http.client.HTTPConnection) -> Any:
            answers.append(read(self))
            if len(answers) == 1:
                answers[0].read()  # the broker has done what it was asked for
                raise ConnectionResetError("lost")
            return answers[-1]

        monkeypatch.setattr(http.client.HTTPConnection, "getresponse", lost_once)
        with connection.consumer("app.jobs", group="g", batch=5, visibility_ms=1000, timeout=4.0) as consumer:
            seen = [message.offset for message in consumer]
        assert sorted(seen) == list(range(1, 21))
