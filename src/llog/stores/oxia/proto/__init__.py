"""Oxia's client protocol. `client.proto` describes the part of it that llog speaks; the rest is generated from it.

To make it again, with `grpcio-tools==1.74.0` (an older release asks less of users' environments), from the root of the
repository:

    python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src
    src/llog/stores/oxia/proto/client.proto
"""
