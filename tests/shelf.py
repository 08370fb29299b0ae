"""A tier that tests can look into, slow down, empty and break."""

from __future__ import annotations

import threading

from patience import PATIENCE_S

from quire.kv.image import BlockName
from quire.kv.tiers.tier import Tier


class Shelf(Tier):
    """A tier in a dict, which can be slowed down, emptied and broken."""

    def __init__(self, image_bytes, name="ssd", is_local=True):
        super().__init__(image_bytes)
        self.name, self.is_local = name, is_local
        self.images: dict[bytes, tuple[BlockName, bytes]] = {}
        self.gate = threading.Event()  # shut, questions and reads hang
        self.gate.set()
        self.read_gate = threading.Event()  # shut, only reads do
        self.read_gate.set()
        self.asked, self.answered = threading.Event(), threading.Event()  # at least once
        self.reading = threading.Event()
        self.broken = False
        self.missed: list[BlockName] = []  # what was to be read and was not there

    def contains(self, keys):
        self.asked.set()
        self.gate.wait(PATIENCE_S)
        self.answered.set()
        return [key in self.images for key in keys]

    def use(self, keys):
        pass

    def read(self, names, images):
        self.reading.set()
        self.gate.wait(PATIENCE_S)
        self.read_gate.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError("a bug")
        there = [name.key in self.images for name in names]
        self.missed += [name for name, held in zip(names, there, strict=True) if not held]
        for name, image, held in zip(names, images, there, strict=True):
            if held:
                kept, content = self.images[name.key]
                assert kept == name
                image[: self.image_bytes] = content
        return there

    def write(self, names, images):
        for name, image in zip(names, images, strict=True):
            self.images[name.key] = (name, bytes(image[: self.image_bytes]))
        return [True] * len(names)

    def close(self):
        pass
