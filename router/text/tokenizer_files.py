"""What a checkpoint's directory says of its tokenizer.

    tokenizer.json           the vocabulary and the pipeline; required
    tokenizer_config.json    special tokens, added tokens, class, prefix space, perhaps the chat template
    special_tokens_map.json  special tokens; goes before the config, but counts only if that has no added_tokens_decoder
    added_tokens.json        added tokens; likewise
    config.json              the model's type, which may decide on the class
    chat_template.jinja, chat_templates/default.jinja
                             the chat template; goes before the one in the config

All but the first may be absent. Names of tokens, their ids and flags, and whether they are special follow transformers
(5.x, AutoTokenizer). So does the class: LlamaTokenizer, Qwen2Tokenizer and GPT2Tokenizer take vocabulary and merges
from the file and have a pipeline of their own, in which `add_prefix_space` and `legacy` of the config count. Every
other class takes the pipeline as the file has it.

Which special tokens a prompt gets is the file's word alone (its post-processor): add_bos_token and add_eos_token
describe tokenizers without that file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from pdserve import logs
from pdserve.errors import ConfigError

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_PIPELINE: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL: Final = "special_tokens_map.json"
_ADDED: Final = "added_tokens.json"
_CLASS_OF_MODEL: Final = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_CLASS_IS_THE_MODELS: Final = ("qwen2",)  # where the config's class is known to be wrong often
_AS_THE_FILE_HAS_IT: Final = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
_DEFAULT_NAMES: Final[Mapping[str | None, Mapping[str, str]]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}
_QWEN_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_log = logs.logger("text")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`special_tokens`: name to text, e.g. "bos_token" to "<s>"; a checkpoint may have names of its own.
    `chat_template`: its source."""

    pipeline: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Raises ConfigError naming the file that is missing or damaged."""
    config = _read_object(directory / _CONFIG)
    text = _read_text(directory / _PIPELINE)
    pipeline = _parse_pipeline(directory / _PIPELINE, text)
    kind = _class(directory, config, text, pipeline)
    tokens = _declared_tokens(directory, config, kind, pipeline)
    with _reading(directory / _PIPELINE):
        pipeline = _pipeline_of(kind, config, text, pipeline)
    # A file may carry the settings of the training run; a prompt is never cut or padded.
    pipeline.no_truncation()
    pipeline.no_padding()
    pipeline.encode_special_tokens = bool(config.get("split_special_tokens"))
    _add_tokens(pipeline, tokens, kind)
    names = {name: token.content for name, token in tokens.names().items()}
    return TokenizerFiles(pipeline, names, _chat_template_source(directory, config))


# Files.


def _read_object(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


def _parse_pipeline(path: Path, text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What is wrong within is said of `path`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: malformed: {error!r}") from error


# The class and its pipeline.


def _class(directory: Path, config: Mapping[str, Any], text: str, pipeline: tokenizers.Tokenizer) -> str | None:
    """The class with a pipeline of its own that the checkpoint is loaded with; None: the file's pipeline."""
    model = _read_object(directory / "config.json")
    model_type = model.get("model_type")
    with _reading(directory / _CONFIG):
        kind = (config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    byte_level = '"ByteLevel"' in text
    if kind == "LlamaTokenizer" and byte_level and model_type not in _CLASS_IS_THE_MODELS:
        return None  # Llama 3 and its like
    if not kind or model_type in _CLASS_IS_THE_MODELS:
        kind = _CLASS_OF_MODEL.get(model_type or "", kind)
    if not kind or kind in _AS_THE_FILE_HAS_IT:
        return None
    if kind not in _DEFAULT_NAMES or not isinstance(pipeline.model, models.BPE):
        _log.warning("tokenizer.json is used as it is", directory=str(directory), tokenizer_class=kind)
        return None
    return kind


def _pipeline_of(
    kind: str | None, config: Mapping[str, Any], text: str, pipeline: tokenizers.Tokenizer
) -> tokenizers.Tokenizer:
    """Vocabulary, merges and post-processor of the file in the pipeline of class `kind`; no added tokens yet."""
    if kind is None:
        return pipeline
    model = json.loads(text)["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    build = {"LlamaTokenizer": _llama, "Qwen2Tokenizer": _qwen2, "GPT2Tokenizer": _gpt2}[kind]
    built = build(model["vocab"], merges, config)
    if pipeline.post_processor is not None:
        built.post_processor = pipeline.post_processor
    return built


_Merges = list[tuple[Any, ...]]


def _llama(vocab: dict[str, int], merges: _Merges, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    prefix_space = config.get("add_prefix_space")
    prefix_space = True if prefix_space is None else prefix_space
    scheme = "never" if not prefix_space else "always" if config.get("legacy") else "first"
    pipeline = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pipeline.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix_space else steps)
    return pipeline


def _qwen2(vocab: dict[str, int], merges: _Merges, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pipeline.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
    prefix_space = bool(config.get("add_prefix_space"))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def _gpt2(vocab: dict[str, int], merges: _Merges, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


# Tokens.


@dataclass(slots=True)
class _Tokens:
    """What the files declare. `added`: by an id that says no more than their order. `named`: special tokens by name;
    None where a file says that there is none. `extra`: special tokens without a name, by text."""

    added: dict[int, AddedToken] = field(default_factory=dict)
    named: dict[str, AddedToken | None] = field(default_factory=dict)
    extra: dict[str, AddedToken] = field(default_factory=dict)

    def take_special(self, file: Mapping[str, Any], **flags: bool) -> None:
        """The special tokens of a file, over those of files before it. `flags`: what is true of all objects in it."""
        for name, value in file.items():
            if name in NAMES or (name.endswith("_token") and isinstance(value, str | dict)):
                self.named[name] = None if value is None else _token(value, **flags)
        unnamed = file.get("extra_special_tokens") or file.get("additional_special_tokens") or []
        if isinstance(unnamed, dict):
            self.named |= {name: _token(value, **flags) for name, value in unnamed.items()}
        else:
            self.extra |= {token.content: token for token in (_token(value, **flags) for value in unnamed)}

    def names(self) -> dict[str, AddedToken]:
        """The named tokens there are: the usual names in their order, then the checkpoint's own."""
        order = [*NAMES, *(name for name in self.named if name not in NAMES)]
        return {name: token for name in order if (token := self.named.get(name)) is not None}

    def special_texts(self) -> set[str]:
        return {token.content for token in self.names().values()} | self.extra.keys()


def _declared_tokens(
    directory: Path, config: Mapping[str, Any], kind: str | None, pipeline: tokenizers.Tokenizer
) -> _Tokens:
    tokens = _Tokens()
    with _reading(directory / _CONFIG):
        tokens.take_special(config)
        for token_id, value in config.get("added_tokens_decoder", {}).items():
            tokens.added[int(token_id)] = _token(value)
    if "added_tokens_decoder" not in config:
        _take_older_files(tokens, directory, pipeline)
    by_text = {token.content: token for token in tokens.added.values()}
    tokens.named |= {name: by_text.get(token.content, token) for name, token in tokens.names().items()}
    defaults = _DEFAULT_NAMES.get(kind, {})
    tokens.named |= {name: _token(text) for name, text in defaults.items() if name not in tokens.named}
    return tokens


def _take_older_files(tokens: _Tokens, directory: Path, pipeline: tokenizers.Tokenizer) -> None:
    """What stood beside tokenizer.json before tokenizer_config.json had it all."""
    with _reading(directory / _SPECIAL):
        tokens.take_special(_read_object(directory / _SPECIAL), special=True)
    with _reading(directory / _ADDED):
        special = tokens.special_texts()
        for text, token_id in _read_object(directory / _ADDED).items():
            tokens.added[int(token_id)] = AddedToken(text, normalized=text not in special, special=text in special)
    tokens.added |= pipeline.get_added_tokens_decoder()


def _token(value: Any, **flags: bool) -> AddedToken:
    """A special token is written as its text or as an object; an added one as an object. `flags` go before its own."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    own = {name: flag for name, flag in value.items() if name not in ("__type", "content")}
    return AddedToken(value["content"], **{**own, **flags})


def _add_tokens(pipeline: tokenizers.Tokenizer, tokens: _Tokens, kind: str | None) -> None:
    """Make known what tokenizer.json does not have, or has with other flags. New ids go on from the vocabulary's
    end."""
    named = tokens.names().values()
    wanted = [token for _, token in sorted(tokens.added.items(), key=lambda item: item[0])]
    known = {token.content for token in [*pipeline.get_added_tokens_decoder().values(), *wanted]}
    for token in [*named, *tokens.extra.values()]:
        if token.content not in known:
            known.add(token.content)
            wanted.append(token)
    texts = {token.content for token in named}
    for token in wanted:
        token.special = token.special or token.content in texts
    pipeline.add_tokens(wanted)
    if kind == "Qwen2Tokenizer":
        pipeline.add_tokens([AddedToken(text, special=True) for text in sorted(tokens.special_texts())])


# The chat template.


def _chat_template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    for path in (directory / "chat_template.jinja", directory / "chat_templates" / "default.jinja"):
        if path.is_file():
            return _read_text(path)
    with _reading(directory / _CONFIG):
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        if isinstance(template, dict):
            template = template.get("default")
        if not (template is None or isinstance(template, str)):
            raise TypeError(f"chat_template is of type {type(template).__name__}")
        return template
