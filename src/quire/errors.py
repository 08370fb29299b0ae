"""Every failure a user can meet, as a type; each message is one sentence that names the mend."""

from __future__ import annotations


class QuireError(Exception):
    """The base of all errors that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """A setting is wrong, unknown, or asks for more than the model or the machine has."""


class RequestError(QuireError, ValueError):
    """A prompt or a sampling parameter cannot be served."""


class PromptTooLong(RequestError):
    """A prompt and its answer would not fit into `max_model_len`."""

    @classmethod
    def of(cls, what: str, size: str, most: int, mend: str = "shorten it") -> PromptTooLong:
        """Agents, LangChain and LiteLLM know by "prompt is too long" and by "this model's maximum
        context length is" that they have to compact a conversation."""
        return cls(
            f"The {what} is too long: it has {size}, and this model's maximum context length is "
            f"{most:,} tokens (max_model_len); {mend}."
        )


class KVError(QuireError, ValueError):
    """The KV library cannot keep or fill the tokens or blocks it was given, or is closed."""


class ModelError(QuireError):
    """A model cannot be found, read or understood."""


REFUSALS = (ModelError, ConfigError)  # why an engine is not opened, by what users are to mend


class EngineFailed(QuireError):
    """The engine cannot go on, whatever it is asked: make a new one."""


def in_one_sentence(error: BaseException, what: str = "The engine") -> str:
    """What users are told where `what` has met `error`, which is for the log.

    The text of an error that is not Quire's was not written for them: it may have any length, and
    the inside of anything.
    """
    if isinstance(error, QuireError):
        return str(error)
    return f"{what} failed ({type(error).__name__}); its log has the reason."


def kind_of(error: BaseException) -> str:
    """The same as a part of a sentence."""
    if isinstance(error, QuireError):
        return str(error).rstrip(".")
    return f"{type(error).__name__} (its log has the reason)"
