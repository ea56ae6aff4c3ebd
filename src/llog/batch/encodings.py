"""Every encoding that a stored body may have, by the name that index entries and blob headers carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from llog.batch import format as bytes_batch
from llog.batch import multi_batch
from llog.batch.columns import Buffer, Columns
from llog.errors import CorruptBatch

Decoder = Callable[[Buffer], Columns]

DECODERS: Final[Mapping[str, Decoder]] = MappingProxyType(
    {bytes_batch.ENCODING: bytes_batch.decode, multi_batch.ENCODING: multi_batch.decode}
)


def decoder(encoding: str) -> Decoder:
    """Return the decoder of an encoding; raises `CorruptBatch` if there is none."""
    found = DECODERS.get(encoding)
    if found is None:
        raise CorruptBatch(
            f"encoding {encoding[:80]!r} is not one of {', '.join(DECODERS)}: a newer version may have written it"
        )
    return found
