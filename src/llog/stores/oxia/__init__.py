"""The metadata store on Oxia, a sharded and replicated key-value store, over its gRPC protocol."""
