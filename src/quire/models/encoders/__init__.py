"""Models that read a whole text at once, both ways: BERT, RoBERTa and what is built like them."""
