"""The engine's process: `python -m quire.engine.process`."""

from __future__ import annotations

import os
import signal
import sys

from quire.gc_control import nothing_is_garbage

# A terminal's Ctrl-C and a service manager's SIGTERM reach this process too. When to end is the
# server's to say: it answers open requests first. Until here they were blocked (`client.py`).
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))

with nothing_is_garbage():
    from quire.engine.process.worker import main

status = main()
# The engine is closed. Python would free all objects one by one now: a tenth of a second more.
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
