"""`--chat-template`: a file, or the template itself, in place of the model's own."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateError

from quire.errors import ConfigError
from quire.models.text.chat_template import MOST_TEMPLATE
from quire.models.text.template_environment import template_environment

IN_TEMPLATES = "{}\n"  # what no path of a template's file has


def read_chat_template(setting: str) -> str:
    """The template's text; ConfigError if there is none, or if it is broken."""
    path = Path(setting)
    if any(char in setting for char in IN_TEMPLATES):
        template, where = setting, "The text of --chat-template"
    else:
        where = f"The chat template {setting}"
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
            raise ConfigError(
                f"{where} cannot be read ({reason}); give a file, or the template itself."
            ) from None
    if len(template) > MOST_TEMPLATE:
        raise ConfigError(f"{where} has more than {MOST_TEMPLATE:,} characters; shorten it.")
    try:
        template_environment().parse(template)  # which runs nothing of it
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"{where} is broken ({error}); mend it.") from None
    return template
