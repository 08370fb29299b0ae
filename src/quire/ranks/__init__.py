"""One model over several processes: who leads, who follows, and what they tell each other."""
