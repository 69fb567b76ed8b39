"""Text to tokens and back, and conversations to prompts."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.token_bytes import TokenBytes

_HUB_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
)
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# Ends of a turn that GGUF files often carry without naming them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


class Tokenizer:
    """A model's tokenizer and chat template.

    Attributes:
      eos_token_ids: ids that end a sequence.
      bos_token_id: or None.
      chat_template: or None where the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
    ):
        """Wraps a `tokenizers` tokenizer; see `load` for the usual way."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.bytes = TokenBytes(backend)

    # Loading ----------------------------------------------------------------------------------

    @classmethod
    def load(cls, source: str | pathlib.Path) -> Tokenizer:
        """Loads a tokenizer.

        Args:
          source: a Hugging Face directory, a tokenizer.json, a .gguf file, or a hub name.

        Raises:
          ValueError: nothing usable is there; one sentence.
        """
        path = pathlib.Path(source).expanduser()
        if path.is_dir():
            return cls._from_directory(path)
        if path.suffix == ".gguf":
            return cls._from_gguf(path)
        if path.is_file():
            return cls._from_directory(path.parent, tokenizer_file=path)
        return cls._from_directory(_download(str(source)))

    @classmethod
    def _from_directory(
        cls, folder: pathlib.Path, tokenizer_file: pathlib.Path | None = None
    ) -> Tokenizer:
        tokenizer_file = tokenizer_file or folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json; save the tokenizer in that format or name "
                "another one by --tokenizer"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{tokenizer_file} is not a valid tokenizer.json: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = {
            name: text
            for name in _SPECIAL_NAMES
            if (text := _token_text(config.get(name))) is not None
        }
        eos = _ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
        eos = eos or _ids(_read_json(folder / "config.json").get("eos_token_id"))
        named = [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
        eos_ids = tuple(dict.fromkeys(i for i in (*eos, *named) if i is not None))
        bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
        source = _chat_template_source(folder, config)
        return cls(
            backend,
            eos_token_ids=eos_ids,
            bos_token_id=bos,
            chat_template=ChatTemplate(source, special) if source is not None else None,
        )

    @classmethod
    def _from_gguf(cls, path: pathlib.Path) -> Tokenizer:
        if not path.is_file():
            raise ValueError(f"the GGUF file {path} does not exist")
        # Here, because reading a GGUF file brings the weights' libraries with it.
        from models.gguf_loader import read_metadata

        return cls.from_gguf_metadata(read_metadata(path))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's metadata describes. Raises ValueError."""
        from engine.gguf_tokenizer import build_tokenizer

        backend = build_tokenizer(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]

        def token(name: str) -> int | None:
            index = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return int(index) if index is not None and 0 <= int(index) < len(tokens) else None

        eos = [i for name in ("eos", "eot", "eom") if (i := token(name)) is not None]
        added = backend.get_added_tokens_decoder()
        eos += [i for i, t in added.items() if t.special and t.content in _TURN_ENDS]
        special = {
            name: tokens[index]
            for name in _SPECIAL_NAMES
            if (
                index := token({"unk_token": "unknown", "pad_token": "padding"}.get(name, name[:3]))
            )
            is not None
        }
        source = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=token("bos"),
            chat_template=ChatTemplate(source, special) if source else None,
        )

    # Use --------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's embedding may be longer."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text. Special tokens written in it become their ids.

        Args:
          text: any Unicode text.
          add_special_tokens: put what the model expects around it (usually the first token).

        Raises:
          ValueError: the text holds half of a surrogate pair.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("the text is not valid Unicode: it holds a lone surrogate") from error

    def encode_aside(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`, for another thread: releases Python's lock, which long texts need."""
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("the text is not valid Unicode: it holds a lone surrogate") from error
        return batch[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; bytes that form no character become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a spelling of the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as one prompt; encode it with add_special_tokens=False.

        Args:
          messages: each {"role": ..., "content": ...}.
          add_generation_prompt: open the assistant's turn at the end.
          chat_template: Jinja text to use instead of the model's.
          **variables: what else the template knows.

        Raises:
          ChatTemplateError (a ValueError): no template, or it refuses the messages.
        """
        template = self.chat_template
        if chat_template is not None:
            special = template._special_tokens if template is not None else None
            template = ChatTemplate(chat_template, special)
        if template is None:
            raise ChatTemplateError(
                "the model has no chat template; use completions, or give one by --chat_template"
            )
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    @property
    def max_token_chars(self) -> int:
        """Characters of the longest token: no text is shorter in tokens than len / this."""
        if not hasattr(self, "_max_token_chars"):
            vocabulary = self._backend.get_vocab(with_added_tokens=True)
            self._max_token_chars = max(map(len, vocabulary), default=1)
        return self._max_token_chars


def _download(name: str) -> pathlib.Path:
    import huggingface_hub

    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES))
        )
    except Exception as error:  # network, authorisation, unknown repository, bad name
        raise ValueError(
            f"tokenizer {name!r} is neither a directory, a file nor a model the hub gave us "
            f"({type(error).__name__}); change --tokenizer or --model"
        ) from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found


def _token_text(entry: object) -> str | None:
    """A special token's text: older files wrap it in an object."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _ids(entry: object) -> list[int]:
    entries = entry if isinstance(entry, list) else [entry]
    return [i for i in entries if isinstance(i, int)]


def _chat_template_source(folder: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    source = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(source, list):  # several by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    return source if isinstance(source, str) else None
