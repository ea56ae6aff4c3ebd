"""The metadata store on Oxia, a sharded and replicated key-value store, over its gRPC protocol."""

from llog.stores.oxia.channels import Security as Security
from llog.stores.oxia.store import OxiaMetaStore as OxiaMetaStore
