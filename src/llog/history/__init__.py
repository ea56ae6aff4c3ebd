"""Recorded histories: what clients asked for and were told, with times, and whether a log that keeps its promises can
have said so.

Writers and readers write down every append and read as it begins and as it ends (`HistoryRecorder`); afterwards
`check_history`, or `llog check-history`, decides the invariants on all files together. `docs/history.md` has the
format.
"""
