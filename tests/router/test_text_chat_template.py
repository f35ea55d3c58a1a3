"""Chats to prompts: the same ids as transformers, and refusals that name the chat."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.embedded import embedded_model_directory
from pdserve.errors import InvalidArgument
from router.text import ChatMessage, Tokenizer
from support import small_tokenizers

LLAMA_2_LIKE = """\
{% if messages[0]['role'] == 'system' %}
    {% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}{% set messages = messages[1:] %}
{% else %}
    {% set system = '' %}
{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {% endif %}
    {% if message.role == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message.content | trim + ' [/INST]' }}
    {% else %}
        {{- ' ' + message.content + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""

ODDITIES = """\
{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- set ns.count = ns.count + 1 -%}
    {% generation %}{{ message | tojson }}{% endgeneration %}
{%- endfor -%}
{{ ns.count }}{{ 'tools' if tools else 'none' }}{{ '|go' if add_generation_prompt }}
"""

CHATS = [
    [ChatMessage("user", "hello")],
    [ChatMessage("system", "be brief"), ChatMessage("user", "hello <s> world ")],
    [ChatMessage("user", "日本語 🙂"), ChatMessage("assistant", "sí & <b>"), ChatMessage("user", "")],
]


def as_dicts(messages: list[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", [LLAMA_2_LIKE, ODDITIES])
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_ids_equal_transformers(
    tmp_path: Path, template: str, messages: list[ChatMessage], generation_prompt: bool
) -> None:
    directory = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, chat_template=template)
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    expected = theirs.apply_chat_template(
        as_dicts(messages), add_generation_prompt=generation_prompt, return_dict=False
    )
    assert ours.apply_chat_template(messages, generation_prompt) == expected


@pytest.mark.embedded
@pytest.mark.parametrize("messages", CHATS)
def test_embedded_model_ids_equal_transformers(messages: list[ChatMessage]) -> None:
    directory = embedded_model_directory()
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(as_dicts(messages), add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(directory).apply_chat_template(messages) == expected


def load(directory: Path, template: str, now: datetime = datetime(2026, 7, 4)) -> Tokenizer:
    small_tokenizers.save(small_tokenizers.byte_level(), directory)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Tokenizer.load(directory, now=lambda: now)


def test_bos_that_the_template_writes_is_not_added_again(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, LLAMA_2_LIKE)
    assert tokenizer.apply_chat_template(CHATS[0]).count(1) == 1


def test_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, chat_template="config")
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "file"


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, chat_template=named)
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "plain"


def test_template_sees_the_time_it_is_given(tmp_path: Path) -> None:
    assert load(tmp_path, "{{ strftime_now('%d %b %Y') }}").render_chat(CHATS[0]) == "04 Jul 2026"


def test_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path))
    with pytest.raises(InvalidArgument, match=r"^chat: the served model has no chat template"):
        tokenizer.apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LLAMA_2_LIKE, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_chat_that_the_template_refuses_is_the_clients_error(tmp_path: Path, template: str, reason: str) -> None:
    messages = [ChatMessage("assistant", "I speak first")]
    with pytest.raises(InvalidArgument, match=f"^chat: the model's chat template refuses it: .*({reason})"):
        load(tmp_path, template).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "has no messages"),
        ([ChatMessage("user", "a"), ChatMessage("tool", "b")], r"messages\[1\].role is 'tool'"),
        ([ChatMessage("x" * 10_000, "b")], r"messages\[0\].role is 'x{200}':"),
    ],
)
def test_bad_messages_are_refused_before_the_template_runs(
    tmp_path: Path, messages: list[ChatMessage], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^chat: {problem}"):
        load(tmp_path, "never seen").apply_chat_template(messages)
