"""Where KV lives: blocks, who holds them, what they hold, and the memory behind them."""
