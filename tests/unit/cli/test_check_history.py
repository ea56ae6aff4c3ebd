"""`llog check-history`: its verdict, its exit codes, and what it says of files that are no histories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llog.cli.main import main
from tests.unit.history.histories import Hand


def check_history(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check-history", *map(str, arguments)])


def test_a_right_history_is_one_clear_line(tmp_path: Path) -> None:
    path = Hand(tmp_path / "h.jsonl").append(0, 1, ["a"], 1).read(2, 3, 1, ["a"], next_offset=2).write()
    result = check_history(path)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "2 operations on 1 partition: nothing wrong"
    assert result.stderr == ""


def test_a_broken_promise_names_the_invariant_the_offsets_and_the_lines(tmp_path: Path) -> None:
    path = Hand(tmp_path / "h.jsonl").append(0, 1, ["a"], 1).read(2, 3, 1, ["b"], next_offset=2).write()
    result = check_history(path)
    assert result.exit_code == 1
    assert (
        f"llog: t/0, offset 1: I1: the append by h ({path}, line 2, ended in line 3) was acknowledged" in result.stderr
    )
    assert "BROKEN" in result.stdout
    found = json.loads(check_history(path, "--json").stdout)
    assert not found["clean"]
    [finding] = found["partitions"][0]["findings"]
    assert (finding["invariant"], finding["start_offset"]) == ("I1", 1)
    assert finding["operations"][1] == {"what": "the read by h", "file": str(path), "line": 4, "end_line": 5}


def test_a_history_without_reads_decides_nothing(tmp_path: Path) -> None:
    result = check_history(Hand(tmp_path / "h.jsonl").append(0, 1, ["a"], 1).write())
    assert result.exit_code == 3
    assert "1 acknowledged records were never read, the first at offset 1" in result.stderr


def test_retention_that_nobody_recorded_is_allowed_for_on_request(tmp_path: Path) -> None:
    hand = Hand(tmp_path / "h.jsonl").append(0, 1, ["a"], 1).append(2, 3, ["b"], 2)
    path = hand.read(4, 5, 2, ["b"], next_offset=3, log_start=2).write()
    assert check_history(path).exit_code == 1
    assert check_history(path, "--unrecorded-retention").exit_code == 0


def test_files_of_several_machines_need_their_skew(tmp_path: Path) -> None:
    here = Hand(tmp_path / "a.jsonl", machine="a").append(0, 1, ["a"], 1).write()
    there = Hand(tmp_path / "b.jsonl", machine="b").read(2, 3, 1, ["a"], next_offset=2).write()
    refused = check_history(here, there)
    assert refused.exit_code == 2
    assert "--clock-skew" in refused.stderr
    assert check_history("--clock-skew", "50ms", here, there).exit_code == 0


HEADER = b'{"line":"process","format":1,"process":"p","machine":"m","wall_ns":0,"clock_ns":0}\n'
BEGIN = b'{"line":"bounds","op":1,"topic":"t","partition":0,"start_ns":5}\n'
END = b'{"line":"end","op":1,"end_ns":6,"outcome":"ok","next_offset":1}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no operation is recorded in"),
        (HEADER, "no operation is recorded in"),
        (b"PAR1 and so on\n", "line 1: it is not a line of a history"),
        (BEGIN + END, "line 1: the first line of a history is of kind 'process'"),
        (HEADER + END, "line 2: operation 1 ends, but did not begin"),
        (HEADER + BEGIN + BEGIN, "line 3: operation 1 began before"),
        (HEADER + BEGIN + END.replace(b"6", b"4"), "line 3: operation 1 ends before it began"),
        (HEADER + b'{"half":\n' + BEGIN + END, "line 2: it is not a line of a history"),
        (HEADER + BEGIN + END + b"\xff\n", "line 4: it is not a line of a history"),
        (HEADER.replace(b":1,", b":2,", 1) + BEGIN, "is of format 2: this version of llog knows 1"),
        (HEADER + b'{"line":"append","op":1,"topic":"t","partition":0,"start_ns":5,"hashes":["x"]}\n' + END, "line 2"),
        (
            HEADER
            + b'{"line":"append","op":1,"topic":"t","partition":0,"start_ns":5,"hashes":["00000000000000ab"]}\n'
            + END,
            "is ok, but its end has no start_offset",
        ),
    ],
)
def test_a_file_that_is_no_history_is_one_clear_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(content)
    result = check_history(path)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(HEADER + BEGIN + END[:20])
    assert check_history(path).exit_code == 0
    path.write_bytes(HEADER + BEGIN + END[:20] + b"\n" + HEADER + BEGIN + END)
    assert check_history(path).exit_code == 0
