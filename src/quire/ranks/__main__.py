"""The process of a rank other than 0: `python -m quire.ranks`."""

from __future__ import annotations

from quire.gc_control import nothing_is_garbage

with nothing_is_garbage():
    from quire.ranks.follower import main

main()
