"""Recorded histories: the requests of clients and their answers, with times, and a checker that decides whether a log
that keeps its promises can have given these answers.

Writers and readers record every append and read when it begins and when it ends (`HistoryRecorder`). Afterwards
`check_history`, or `llog check-history`, decides the invariants on all files together. `docs/history.md` describes the
format.
"""
