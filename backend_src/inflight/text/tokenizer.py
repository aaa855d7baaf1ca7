"""Tokenizer: a checkpoint's text <-> ids, with its chat template."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from inflight.errors import CheckpointError, InvalidRequestError, UnsupportedRequestError
from inflight.text.chat_template import ChatTemplate, parse_messages
from inflight.text.tokenizer_files import read_tokenizer_files

_ANCHOR = "\n"
"""Text that words are put behind to see how they are spelled inside a text: in every family it is
a token of its own, or none."""


_QUICK_CHARS = 4096
"""Texts up to this take about as long as a thread may keep the interpreter to itself anyway (5 ms).
Longer ones may take seconds."""


class Tokenizer:
    """Holds no state of any request; safe to share by threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None
    ) -> None:
        """``backend`` must neither truncate nor pad, and is not changed any more."""
        self._backend = backend
        self._chat_template = chat_template
        self._is_visible: dict[int, bool] = {}
        self._special_ids = {
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._byte_values = _byte_fallback_tokens(backend)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json,
        special_tokens_map.json and chat_template.jinja. Raises CheckpointError."""
        files = read_tokenizer_files(directory)
        template = None
        if files.chat_template is not None:
            try:
                template = ChatTemplate(files.chat_template, files.special_tokens)
            except CheckpointError as error:
                raise CheckpointError(f"{directory}: {error}") from None
        return cls(files.backend, template)

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included; a model may have more rows than that."""
        size: int = self._backend.get_vocab_size()
        return size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """``add_special_tokens``: with what the checkpoint puts around a prompt (BOS, mostly).

        Raises InvalidRequestError for a string that is no text (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError("text_input", "...", "is not valid Unicode") from None
        if len(text) <= _QUICK_CHARS:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # the library lets other threads run during a batch only
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(self, messages: str) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer.

        ``messages``: see ``parse_messages``. The template alone decides about BOS and other special
        tokens, as in transformers, so there is never a second BOS. Raises InvalidRequestError, and
        UnsupportedRequestError where the checkpoint has no template.
        """
        if self._chat_template is None:
            raise UnsupportedRequestError(
                "messages", "this checkpoint has no chat template: send text_input"
            )
        prompt = self._chat_template.render(parse_messages(messages))
        return self.encode(prompt, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` (each >= 0), without special tokens and ids it does not know.

        Spaces stay as the checkpoint's decoder makes them. Bytes that are no UTF-8 become U+FFFD.
        """
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def decode_after(self, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
        """What ``ids`` add to the text of ``prefix_ids``: their text inside a text.

        It differs from ``decode(ids)`` where a decoder treats the first token of a text in its own
        way, as SentencePiece does with its space.
        """
        return self.decode([*prefix_ids, *ids])[len(self.decode(prefix_ids)) :]

    def word_sequences(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The id sequences that spell ``word``: alone, inside a text, and there after a space.

        The ways the tokenizer itself would spell it; a model can find others. () where there is
        none, as for a word with a letter that the vocabulary does not have.
        """
        try:
            anchor = self.encode(_ANCHOR, add_special_tokens=False)
            candidates = []
            for text in (word, " " + word):
                candidates.append(self.encode(text, add_special_tokens=False))
                anchored = self.encode(_ANCHOR + text, add_special_tokens=False)
                if anchored[: len(anchor)] == anchor:
                    candidates.append(anchored[len(anchor) :])
        except InvalidRequestError:  # no text, so no tokens
            return ()
        unique = dict.fromkeys(tuple(ids) for ids in candidates if ids)
        spellings = {_normalized(word), _normalized(" " + word)}
        return tuple(
            ids for ids in unique if _normalized(self.decode_after(anchor, ids)) in spellings
        )

    def is_visible(self, token_id: int) -> bool:
        """False for ids that ``decode`` leaves out: special tokens, and ids it does not know."""
        visible = self._is_visible.get(token_id)
        if visible is None:
            known = self._backend.id_to_token(token_id) is not None
            visible = known and token_id not in self._special_ids
            self._is_visible[token_id] = visible
        return visible

    @property
    def has_byte_fallback(self) -> bool:
        """True where bytes are tokens of their own, and a run of them is decoded as one piece.

        One byte that is no UTF-8 then turns the whole run into U+FFFD, earlier characters included.
        """
        return bool(self._byte_values)

    def byte_value(self, token_id: int) -> int | None:
        """The byte (0..255) that a byte-fallback token stands for; None for other tokens."""
        return self._byte_values.get(token_id)


def _byte_fallback_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Id -> byte of the ``<0xNN>`` tokens, if the decoder takes them for bytes; else {}."""
    values = {
        token_id: byte
        for byte in range(256)
        if (token_id := backend.token_to_id(f"<0x{byte:02X}>")) is not None
    }
    decodes_bytes = any(backend.decode([i]) != backend.id_to_token(i) for i in list(values)[:1])
    return values if decodes_bytes else {}


def _normalized(text: str) -> str:
    """Tokenizers may normalise what they encode, most by NFC or NFKC."""
    return unicodedata.normalize("NFKC", text)
