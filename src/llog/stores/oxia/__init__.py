"""The metadata store on Oxia, a sharded and replicated key-value store, over its gRPC protocol.

Only `llog.opening` and the tests import from here; the packages of the extra `oxia` are needed.
"""
