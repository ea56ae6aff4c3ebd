from __future__ import annotations

import subprocess
import sys

# In a process of its own, which a race that is lost would end.
_RACES = '''
from __future__ import annotations
import gc, sys, threading, types
from llog.base.decoders import json_decoder
STRUCTS = """
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    text: str | None = None
    number: int | None = None
class Middle(msgspec.Struct):
    inner: Inner | None = None
    more: list[Inner] = []
class Outer(msgspec.Struct):
    middles: list[Middle] | None = None
"""
sys.setswitchinterval(1e-6)
gc.set_threshold(50)
for number in range(500):
    module = sys.modules[f"structs_{number}"] = types.ModuleType(f"structs_{number}")
    exec(STRUCTS, module.__dict__)
    barrier = threading.Barrier(8)
    def decode():
        barrier.wait()
        json_decoder(module.Outer).decode(b'{"middles": [{"inner": null, "more": [{"text": "a"}]}]}')
    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
'''


def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", _RACES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
