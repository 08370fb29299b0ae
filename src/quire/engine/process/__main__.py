"""The engine's process: `python -m quire.engine.process`."""

from __future__ import annotations

from quire.gc_control import nothing_is_garbage

with nothing_is_garbage():
    from quire.engine.process.worker import main

main()
