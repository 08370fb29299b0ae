"""Quire's tiers under other engines, as each of them wants a cache to be."""
