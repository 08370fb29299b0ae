"""Chat templates render as `transformers` renders them, and cannot leave their sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quire.errors import ModelError, RequestError
from quire.models.text.chat_template import render
from quire.models.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi <b>&</b> 🍐"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
]
TEMPLATES = {
    "plain": "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}\n{% endfor %}",
    "white space": (
        "  {% for m in messages %}\n    {% if m.role == 'user' %}\n  U:{{ m.content }}\n"
        "    {%- else %}\n  {{- m.content }}\n    {% endif %}\n  {% endfor %}\nend  "
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}"
    ),
    "special tokens": "{{ bos_token }}{{ messages[-1].content | trim }}{{ eos_token }}",
    "prompt": "{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}",
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ tools is none }}{{ unknown is defined }}"
    ),
    "turns, as Gemma has them": (
        "{{ bos_token }}{% set first, rest = '', messages %}"
        "{%- if messages[0]['role'] == 'system' -%}"
        "{%- set said = messages[0]['content'] -%}"
        "{%- set first = said + '\n\n' if said is string else '' -%}"
        "{%- set rest = messages[1:] -%}{%- endif -%}"
        "{%- for m in rest -%}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('Roles must alternate.') }}{%- endif -%}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
        "{{ first if loop.first else '' }}{{ m['content'] | trim }}{{ '<end_of_turn>\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    ),
    "macro": "{% macro shout(x) %}{{ x | upper }}!{% endmacro %}{{ shout(messages[0].content) }}",
    "strings": (
        "{{ messages[0].content.split(' ') | join('-') }}{{ messages[0].content[:2] }}"
        "{{ 'x'.startswith('x') }}{{ messages | length }}{{ strftime_now('%Y') }}"
    ),
}


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    backend = Backend(BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [USER, TALK], ids=["one", "talk"])
@pytest.mark.parametrize("ask", [True, False])
def test_renders_as_transformers_does(
    oracle: PreTrainedTokenizerFast, name: str, messages: list[dict[str, str]], ask: bool
) -> None:
    expected = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=ask
    )
    found = render(TEMPLATES[name], messages, ask, {"bos_token": "<s>", "eos_token": "</s>"})
    assert found == expected


def test_the_demo_model_renders_as_transformers_does(
    golden: dict[str, Any], tokenizer: Tokenizer
) -> None:
    assert len(golden["chats"]) >= 10
    for chat in golden["chats"]:
        ask = chat["add_generation_prompt"]
        assert tokenizer.apply_chat_template(chat["messages"], ask) == chat["text"]


def test_extra_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    template = "{{ enable_thinking }}{{ tools[0] }}{{ template }}{{ eos_token }}"
    chatty = Tokenizer(tokenizer.backend, tokenizer.special_tokens, template)
    variables = {"enable_thinking": False, "tools": [7], "template": "x"}
    assert chatty.apply_chat_template(USER, variables=variables) == "False7x<|im_end|>"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    message = {"role": "user", "content": parts}
    assert render("{{ messages[0].content }}", [message]) == "one\ntwo\nthree"


def test_a_tool_call_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    template = "{{ messages[1].tool_calls[0].id }}{{ messages[1].content is none }}"
    assert render(template, [*USER, call]) == "1True"


BAD_MESSAGES: dict[str, Any] = {
    "empty": [],
    "a string": "hello",
    "a mapping": {"role": "user", "content": "x"},
    "none": None,
    "not mappings": ["hello"],
    "no role": [{"content": "x"}],
    "empty role": [{"role": "", "content": "x"}],
    "role of another type": [{"role": 1, "content": "x"}],
    "no content": [{"role": "user"}],
    "content of another type": [{"role": "user", "content": 7}],
    "a part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_messages(name: str) -> None:
    assert_one_sentence("{{ messages }}", BAD_MESSAGES[name])


HOSTILE = {
    "class": "{{ ''.__class__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "function's code": "{{ strftime_now.__code__ }}",
    "by filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "by item": "{{ messages['__class__']['__base__'] }}",
    "format": "{{ '{0.__class__.__init__}'.format('') }}",
    "caller": "{{ self.__init__.__globals__ }}",
    "change a message": "{{ messages.append(1) }}",
    "change a dict": "{{ messages[0].update({'role': 'x'}) }}",
    "huge range": "{% for i in range(10 ** 9) %}x{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_gets_nothing(name: str) -> None:
    messages = [dict(message) for message in USER]
    try:
        text = render(HOSTILE[name], messages)
    except RequestError as error:
        assert "refuses" in str(error)
    else:
        assert text == ""  # the sandbox gave it an undefined value
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\n alternate.') }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{% generation %}",
        "{{ 'x' + 1 }}",
        "{% include 'file' %}",
    ],
)
def test_a_failing_template(template: str) -> None:
    message = assert_one_sentence(template, USER)
    assert "chat template" in message


def test_the_reason_of_a_template_is_told() -> None:
    template = "{{ raise_exception('roles must\n alternate.') }}"
    assert "(roles must alternate)" in assert_one_sentence(template, USER)


def assert_one_sentence(template: str, messages: Any) -> str:
    with pytest.raises(RequestError) as caught:
        render(template, messages)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_a_model_without_a_template(tokenizer: Tokenizer) -> None:
    bare = Tokenizer(tokenizer.backend, tokenizer.special_tokens, None)
    with pytest.raises(RequestError, match="no chat template"):
        bare.apply_chat_template(USER)


@pytest.mark.parametrize("where", ["jinja", "config", "config list", "json"])
def test_where_a_folder_keeps_its_template(
    where: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"jinja": "no", "config": "D", "config list": named, "json": None}[where]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text("D")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(USER) == "D"


def test_a_folder_with_a_broken_config(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "golden" / "smollm2.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    from quire.models.checkpoints.gguf_file import GGUFFile

    return Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata)


def test_what_a_template_raises_is_told_in_brief():
    with pytest.raises(RequestError) as error:
        render(
            "{{ raise_exception(messages | string) }}", [{"role": "user", "content": "x" * 9999}]
        )
    assert len(str(error.value)) < 500
