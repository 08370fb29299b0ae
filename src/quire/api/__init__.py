"""How people reach Quire: from Python and from the command line."""
