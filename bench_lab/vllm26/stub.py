"""Stands in for a package that vLLM imports at the top of a module and that this benchmark never calls."""

import types

__version__ = "0.0"


class _Attributes(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Attributes):
    def __class_getitem__(cls, item):
        return cls


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
