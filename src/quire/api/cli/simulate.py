"""`quire simulate`: what a fleet would do with a trace, without a device."""

from quire.simulate.command import add_arguments, run

__all__ = ["add_arguments", "run"]
