"""Drafters that tests write the script for."""

from __future__ import annotations

import numpy as np

from quire.engine.draws.speculation import Speculation
from quire.speculative.controller import Controller
from quire.speculative.drafter import NO_TOKENS, Outlook


class ScriptedDrafter:
    """Drafts what `next_tokens` says comes next, and spoils what `is_spoilt` picks out."""

    def __init__(self, next_tokens, is_spoilt=lambda name, place: False, vocab=50):
        self.next_tokens = next_tokens
        self.is_spoilt = is_spoilt
        self.vocab = vocab
        self.forgotten = []

    def look(self, name, token_ids):
        return Outlook(True)

    def propose(self, wanted):
        return [self._drafts(each.name, each.token_ids, each.most) for each in wanted]

    def forget(self, name):
        self.forgotten.append(name)

    def _drafts(self, name, token_ids, most):
        drafts = list(self.next_tokens(name, token_ids, most))[:most]
        for i in range(len(drafts)):
            if self.is_spoilt(name, len(token_ids) + i):
                drafts[i] = (drafts[i] + 1) % self.vocab
        return np.array(drafts, dtype=np.int32) if drafts else NO_TOKENS


def one_in_four(name, place):
    """So that what it wrote is rolled back, and what came before it stays."""
    return place % 4 == 0


class Always(Controller):
    """Never lets up, however the drafts fare."""

    def length(self, most, price):
        return most


def speculate(engine, drafter, most, always=True):
    """Let the engine have drafts; with `always`, in every step that can have some."""
    engine.scheduler.speculation = Speculation(drafter, most)
    if always:
        always_draft(engine)
    return engine.scheduler.speculation


def always_draft(engine):
    """Whatever time it takes: a test's machine may be busy."""
    engine.scheduler.speculation.new_controller = Always
    engine.scheduler.speculation.plain_every = 2**60
