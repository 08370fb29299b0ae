"""What formats there are, for settings, which must not import them."""

AUTO = "auto"
FORMAT_NAMES = ("hermes", "llama3", "mistral", "mistral-named", "harmony")
