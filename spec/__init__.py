"""Executable specification of the log's protocols: every interleaving of small configurations, searched
exhaustively.
"""
