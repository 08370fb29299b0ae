"""From a request's body to its answer: prompts, formats, text, tools, shapes."""
