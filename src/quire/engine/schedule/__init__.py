"""What the next step computes: queues, budget, prefixes, and what the tiers load for them."""
