"""Oxia's client protocol. `client.proto` describes the part of it that llog speaks; the rest is generated from it.

To make it again, with `grpcio-tools==1.74.0` (an older release asks less of users' environments), from the root of the
repository:

    cd src && python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \\
        llog/stores/oxia/proto/client.proto
"""
