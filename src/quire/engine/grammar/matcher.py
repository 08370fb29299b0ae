"""How `llguidance` makes a grammar, the same way in the sandbox and in the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def limits() -> LLParserLimits:
    """What one grammar may cost while it is used: a mask takes tens of milliseconds at the most.

    Requests with the same form share its lexer, whose states are made as texts need them: 20,000
    of half a kilobyte to a kilobyte and a half. What compiling costs is only partly covered: the
    remainders of `multipleOf`, for one, are not. That is what the sandbox is for.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def new_matcher(guided: LLTokenizer, grammar: str) -> LLMatcher:
    """It may be in error: `is_error` says so."""
    from llguidance import LLMatcher

    matcher = LLMatcher(guided, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # some grammars show only here that they are too large
    return matcher
