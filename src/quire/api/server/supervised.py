"""A server under a supervisor: `python -m quire.api.server.supervised`."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys

from quire.api.flag_names import fields_of, in_flags
from quire.api.server.serve import serve_on
from quire.api.server.settings import ServerConfig
from quire.api.server.supervisor import UNFORESEEN
from quire.config import EngineConfig
from quire.errors import QuireError


def main() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there are replicas to restart
    what = json.loads(sys.stdin.readline())
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    settings = ServerConfig(**what["settings"])
    engine = EngineConfig.create(**what["engine"])
    try:
        with socket.socket(fileno=int(sys.argv[1])) as listener:
            return serve_on(listener, settings, engine, lifeline=sys.stdin)
    except QuireError as error:
        names = fields_of(ServerConfig, EngineConfig)  # the flags of `quire serve`
        print(f"error: {in_flags(str(error), names)}", file=sys.stderr)
        return 2
    except Exception:
        logging.getLogger("quire.server").exception("The server failed.")
        return UNFORESEEN


if __name__ == "__main__":
    sys.exit(main())
