"""The fake model under adapters: what each token leaves in the pool shows whose it is.

An adapter's folder has one number for its contents, from 1; the model itself has 0. Every slot has
the number beside the token, and the next token is a hash of both. So a block of another adapter, a
slot that was loaded too late, or with something else, changes every token after it.
"""

from __future__ import annotations

import threading

from fake_model import TOKEN_BITS, FakeRunner, insist, next_token
from patience import PATIENCE_S

from quire.errors import ModelError
from quire.lora_request import LoRARequest
from quire.runner.plan import AdapterInfo


def fingerprint_of(contents):
    return f"f{contents}"


def contents_of(namespace):
    """Of the adapter that a block's namespace names."""
    _, _, fingerprint = namespace.partition("\0")
    return int(fingerprint[1:]) if fingerprint else 0


def adapted(tokens, contents):
    """As they lie in the pool."""
    return [token | contents << TOKEN_BITS for token in tokens]


def expected_with(contents, prompt, max_tokens):
    """What a greedy request must give, whatever happens around it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(adapted(tokens, contents)))
    return tokens[len(prompt) :]


def lora(name, number=1, path=None, **more):
    return LoRARequest(name, number, path or f"/adapters/{name}", **more)


class AdaptedRunner(FakeRunner):
    def __init__(self, cache):
        super().__init__(cache)
        self.folders = {}  # by path, its contents
        self.in_host = set()
        self.in_slots = {}
        self.num_reads = 0
        self.most_in_host = 0
        self.may_read = threading.Event()
        self.may_read.set()
        self.before_load = lambda fingerprint: None

    def read_adapter(self, path):
        assert self.may_read.wait(PATIENCE_S)
        if path not in self.folders:
            raise ModelError(f"There is no adapter in {path}; check the path.")
        fingerprint = fingerprint_of(self.folders[path])
        self.in_host.add(fingerprint)
        self.num_reads += 1
        self.most_in_host = max(self.most_in_host, len(self.in_host))
        return AdapterInfo(fingerprint, rank=1, num_bytes=1)

    def forget_adapter(self, fingerprint):
        self.in_host.discard(fingerprint)

    def load_adapter(self, fingerprint, slot):
        self.before_load(fingerprint)
        insist(fingerprint in self.in_host, "an adapter was loaded that host memory does not have")
        self.in_slots[slot] = int(fingerprint[1:])

    def launch(self, plan):
        insist(len(plan.adapter_slots) in (0, len(plan.counts)), "a slot for each sequence")
        return super().launch(plan)

    def _stored(self, plan, sequence, at):
        slot = int(plan.adapter_slots[sequence]) if len(plan.adapter_slots) else -1
        contents = 0 if slot == -1 else self.in_slots[slot]
        return plan.token_ids[at] | contents << TOKEN_BITS

    def check_blocks(self):
        """Every block that can be found was computed with its namespace's adapter."""
        index = self.cache.index
        for block in index._by_block:
            namespace, _ = index.content(block)
            stored = self.pool[block] >> TOKEN_BITS
            insist((stored == contents_of(namespace)).all(), "a block of another adapter")
