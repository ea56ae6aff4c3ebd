"""Errors cross between processes: Spark's tasks hand them to the driver by pickle."""

from __future__ import annotations

import pickle

import pytest

from llog import errors
from llog.broker.http.problems import problem_of
from llog.errors import LlogError, OffsetOutOfRange, PartlyAppended, SqlError, StaleReads, StoreUnavailable

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, LlogError)]
WITH_FIELDS: dict[type[LlogError], LlogError] = {
    OffsetOutOfRange: OffsetOutOfRange("t/0", 5, 10, 20),
    SqlError: SqlError("x", 1, 2, "hint", "\n  x\n  ^"),
    PartlyAppended: PartlyAppended(1, [None, StoreUnavailable("x")], StoreUnavailable("x")),
}


def test_every_error_with_fields_of_its_own_has_an_example() -> None:
    assert {each for each in CLASSES if "__init__" in vars(each)} == set(WITH_FIELDS)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_comes_out_of_a_pickle_as_it_was(kind: type[LlogError]) -> None:
    error = WITH_FIELDS.get(kind) or kind("what was wrong")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), repr(vars(copy))) == (str(error), repr(vars(error)))


def test_the_broker_answers_stale_reads_as_an_error_that_passes() -> None:
    answer = problem_of(StaleReads("a server that was paused has answered"))
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


def test_no_two_errors_have_one_code() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)
