"""Building blocks of a model, written so that each can be split over several devices."""
