"""Which blocks a tier keeps when it cannot keep all: by recency, or by what it learned."""

from quire.kv.policy.learned import LearnedPolicy
from quire.kv.policy.lru import LRUPolicy
from quire.kv.policy.protocol import Policy

__all__ = ["LRUPolicy", "LearnedPolicy", "Policy"]
