"""`quire simulate`: what a fleet would do with a trace, without a device."""

from quire.simulate.command import EXAMPLES, add_arguments, run

__all__ = ["EXAMPLES", "add_arguments", "run"]
