"""A faster callback by which SlateDB asks for the filtered prefix of a key.

SlateDB calls it for every entry that it puts into a table, from a thread of its own. The binding's generated callback
takes about 60 µs of Python per call; this one takes a third of that, which limits a writer of single records. It serves
one class of extractor only, and is installed only for the versions it was tested with, after a self-test; otherwise the
stock callback stays, slow but correct.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Final

from llog.keyed import fast_bytes

_SAMPLES: Final = (b"", b"\x01", b"\x01\x01" + bytes(8) + b"key\x00" + bytes(8), b"\x01\x04" + bytes(8) + b"key")
_NONE: Final = b"\x00"
_SOME: Final = b"\x01"
_LAST_ANSWERS_S: Final = 0.03

_installed: bool | None = None
_answer_count = [0]
_referenced_by_rust: list[object] = []
"""Objects that Rust points to, kept alive until the process ends."""


def install(extractor: Any, prefix_length: Callable[[bytes], int]) -> bool:
    """Have `prefix_length` answer for extractors of this one's class (0 means no prefix), if possible, and return
    whether it does. Takes effect once per process.
    """
    global _installed
    if _installed is None:
        _installed = fast_bytes.install() and _replace(extractor, prefix_length)
    return _installed


def stop_answering(limit_s: float) -> None:
    """Keep all of SlateDB's calls from reaching Python, at the end of the process.

    SlateDB's threads go on after a database is closed, since closing does not wait for a compaction under way. A thread
    that enters Python while the interpreter shuts down is ended in the middle of Rust, which aborts the process. So
    this waits until no call has come for a while, at most `limit_s`. A table that is still being built then fails with
    a message of Rust's, but without loss: its sources still exist.
    """
    try:
        from slatedb.uniffi._slatedb_uniffi import slatedb as binding

        stock = binding._UniffiTraitImplPrefixExtractorImpl
        kind = binding._UNIFFI_CALLBACK_INTERFACE_SLATEDB_PREFIX_EXTRACTOR_METHOD1
        no_op = kind(ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value)  # a function that touches nothing
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            before = _answer_count[0]
            time.sleep(_LAST_ANSWERS_S)
            if before == _answer_count[0]:
                break
        _install_callback(binding, stock, no_op)
    except (ImportError, AttributeError, TypeError, OSError, ctypes.ArgumentError):
        return
    time.sleep(_LAST_ANSWERS_S)


def _install_callback(binding: Any, stock: Any, callback: Any) -> None:
    table = binding._UniffiVTableCallbackInterfaceSlatedbPrefixExtractor(
        stock._uniffi_free, stock._uniffi_clone, stock.name, callback
    )
    binding._UniffiLib.uniffi_slatedb_uniffi_fn_init_callback_vtable_prefixextractor(ctypes.byref(table))
    _referenced_by_rust.extend((callback, table))


def _replace(extractor: Any, prefix_length: Callable[[bytes], int]) -> bool:
    try:
        from slatedb.uniffi._slatedb_uniffi import slatedb as binding

        callback = _callback(binding, type(extractor), prefix_length)
        if not all(_answers(binding, callback, extractor, sample) for sample in _SAMPLES):
            return False
        _install_callback(binding, binding._UniffiTraitImplPrefixExtractorImpl, callback)
    except (ImportError, AttributeError, TypeError, ctypes.ArgumentError):
        return False
    return True


def _callback(binding: Any, owner: type, prefix_length: Callable[[bytes], int]) -> Any:
    # PyDLL: these calls only move memory, and releasing the GIL would cost more than the calls do.
    library = ctypes.PyDLL(binding._UniffiLib._name)
    free = library.ffi_slatedb_uniffi_rustbuffer_free
    free.argtypes, free.restype = (binding._UniffiRustBuffer, ctypes.c_void_p), None
    from_bytes = library.ffi_slatedb_uniffi_rustbuffer_from_bytes
    from_bytes.argtypes, from_bytes.restype = (fast_bytes.Bytes, ctypes.c_void_p), binding._UniffiRustBuffer
    status = binding._UniffiRustCallStatus.default()
    status_address = ctypes.addressof(status)
    _referenced_by_rust.append(status)
    extractors = binding._UniffiFfiConverterTypePrefixExtractor._handle_map._map
    stock = binding._UniffiTraitImplPrefixExtractorImpl.prefix_len

    def prefix_len(handle: int, target: Any, answer: Any, call_status: Any) -> None:
        if type(extractors.get(handle)) is not owner:
            stock(handle, target, answer, call_status)
            return
        _answer_count[0] += 1
        key = target.data[8 : target.len]  # after the kind of target and the key's length
        free(target, status_address)
        length = prefix_length(key)
        content = _SOME + length.to_bytes(8, "big") if length else _NONE
        answer[0] = from_bytes(fast_bytes.Bytes(len(content), content), status_address)

    return binding._UNIFFI_CALLBACK_INTERFACE_SLATEDB_PREFIX_EXTRACTOR_METHOD1(prefix_len)


def _answers(binding: Any, callback: Any, extractor: Any, key: bytes) -> bool:
    """Whether the callback gives the same answer for the key as the extractor."""
    target = binding.PrefixTarget.POINT(key)
    expected = binding._UniffiFfiConverterOptionalUInt64.lower(extractor.prefix_len(target))
    handle = binding._UniffiFfiConverterTypePrefixExtractor.lower(extractor)
    answer = (binding._UniffiRustBuffer * 1)()
    status = binding._UniffiRustCallStatus.default()
    try:
        callback(handle, binding._UniffiFfiConverterTypePrefixTarget.lower(target), answer, ctypes.pointer(status))
    finally:
        binding._UniffiFfiConverterTypePrefixExtractor._handle_map.remove(handle)
    return fast_bytes.content(answer[0]) == fast_bytes.content(expected)
