"""`python -m quire` is the `quire` command."""

from __future__ import annotations

import sys

from quire.api.cli import main

sys.exit(main())
