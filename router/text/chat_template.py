"""A checkpoint's chat template: messages to the text of a prompt.

The template is a Jinja program that came with the weights; it runs sandboxed. It sees what the ecosystem's templates
expect: messages, add_generation_prompt, the names of the special tokens, raise_exception, strftime_now, tojson, loop
controls and {% generation %}. There are no tools or documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import ConfigError, InvalidArgument

ROLES: Final = ("system", "user", "assistant")

_MAX_QUOTED_CHARS: Final = 200  # of the client's or the template's words in an error

# What a template may raise while it runs: Jinja's own errors and those of the Python operations it is made of.
_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatMessage(NamedTuple):
    """One turn. `role` is one of ROLES."""

    role: str
    content: str


class ChatTemplate:
    """A compiled template. Rendering has no state and may run in any thread."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`special_tokens`: name to text, e.g. "bos_token" to "<s>". Raises ConfigError for a syntax error."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        """The prompt's text, special tokens spelled out. Raises InvalidArgument if there is no message, a role is
        unknown or the template refuses the conversation."""
        _check(messages)
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "messages": [message._asdict() for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RENDER_ERRORS as error:
            raise InvalidArgument(
                "chat", f"the model's chat template refuses it: {str(error)[:_MAX_QUOTED_CHARS]}"
            ) from error


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidArgument("chat", "has no messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            role = message.role[:_MAX_QUOTED_CHARS]
            raise InvalidArgument("chat", f"messages[{index}].role is {role!r}: must be one of {', '.join(ROLES)}")


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration is a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; prompts are not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
