"""What the two processes say to each other: JSON behind its length. Images are in shared memory."""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")

# Codes of the store's that mean something here; any other below zero is a failure.
NOT_FOUND = -704
WRONG_SIZE = -600


def pack(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
