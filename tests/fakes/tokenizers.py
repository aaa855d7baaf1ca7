"""Small tokenizers of every family that decoder models use, built in memory.

Their vocabularies are made to be nasty: characters in several pieces, tokens that begin inside a
character and end inside the next, bytes that are no UTF-8, words that differ in a space only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from inflight.text.chat_template import ChatTemplate
from inflight.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
WORDS = [
    "the",
    "he",
    "llo",
    "sto",
    "stop",
    "top",
    "p",
    "ing",
    "a",
    "ab",
    "b",
    "cab",
    ".",
    ",",
    "\n",
]
LETTERS = sorted({*"abcdefghijklmnopqrstuvwxyz0123456789.,:\n€日本語😊🙂é"})


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2's family: every token is a string of bytes."""
    symbol = _byte_symbols()
    vocab = {symbol[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    straddling = [b"\x98\x8a\xf0", b"\x98\x8a\xf0\x9f", b"p\xf0\x9f", b"\xac!", b"\xff\xe2"]
    texts = [*(" " + word for word in WORDS), *WORDS, "😊", "€", "日本", "é"]
    for piece in [*(text.encode() for text in texts), *straddling]:
        left = symbol[piece[0]]
        for byte in piece[1:]:  # every beginning of a piece is a token too
            if left + symbol[byte] not in vocab:
                vocab[left + symbol[byte]] = len(vocab)
                merges.append((left, symbol[byte]))
            left += symbol[byte]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_special_tokens(backend)


def llama_backend() -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback, whose decoder strips the first space of a text."""
    backend = gemma_backend()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.post_processor = TemplateProcessing(
        single=[BOS, "$A"], special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return backend


def gemma_backend() -> tokenizers.Tokenizer:
    """The same family without a space before the first word."""
    pieces = _sentence_pieces()
    vocab = {piece: place for place, piece in enumerate(["<unk>", *_byte_tokens(), *pieces])}
    merges = _merges(vocab, pieces)
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_special_tokens(backend)


def unigram_backend() -> tokenizers.Tokenizer:
    """SentencePiece Unigram with byte fallback and a Metaspace decoder."""
    pieces = ["<unk>", *_byte_tokens(), *_sentence_pieces()]
    scores = [(piece, -float(place)) for place, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_special_tokens(backend)


def metaspace_backend() -> tokenizers.Tokenizer:
    """SentencePiece Unigram without bytes."""
    pieces = ["<unk>", *_sentence_pieces()]
    scores = [(piece, -float(place)) for place, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _with_special_tokens(backend)


def word_piece_backend() -> tokenizers.Tokenizer:
    """BERT's family: ``##`` continues a word."""
    pieces = [*LETTERS, *(word for word in WORDS if word != "\n")]
    vocab = {
        piece: place
        for place, piece in enumerate(["[UNK]", *_unique([*pieces, *("##" + p for p in pieces)])])
    }
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _with_special_tokens(backend)


def word_end_backend() -> tokenizers.Tokenizer:
    """The first GPT's family: ``</w>`` ends a word."""
    vocab = {
        piece: place
        for place, piece in enumerate(_unique([*LETTERS, *(letter + "</w>" for letter in LETTERS)]))
    }
    model = models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    return _with_special_tokens(backend)


BACKENDS: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level_backend,
    "llama": llama_backend,
    "gemma": gemma_backend,
    "unigram": unigram_backend,
    "metaspace": metaspace_backend,
    "word_piece": word_piece_backend,
    "word_end": word_end_backend,
}


def make_tokenizer(family: str, chat_template: str | None = None) -> Tokenizer:
    """A Tokenizer of one of BACKENDS' families."""
    template = None
    if chat_template is not None:
        template = ChatTemplate(chat_template, {"bos_token": BOS, "eos_token": EOS})
    return Tokenizer(BACKENDS[family](), template)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids that spell ``data`` byte by byte; [] for a family that cannot."""
    if tokenizer.has_byte_fallback:
        ids = {tokenizer.byte_value(token_id): token_id for token_id in range(257)}
        return [ids[byte] for byte in data]
    return list(data) if tokenizer.vocab_size > 256 else []


def _with_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, EOS)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Visible Latin-1 characters stand for themselves; the others, in order, follow from U+0100 on.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _sentence_pieces() -> list[str]:
    letters = [letter for letter in LETTERS if letter.isascii()]  # the others fall back to bytes
    return _unique(["▁", "▁▁", *letters, *WORDS, *("▁" + word for word in WORDS), "é", "\ufffd"])


def _merges(vocab: Mapping[str, int], pieces: Iterable[str]) -> list[tuple[str, str]]:
    """For each piece the first pair of known pieces that it is made of."""
    merges = []
    for piece in pieces:
        for cut in range(1, len(piece)):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                merges.append((piece[:cut], piece[cut:]))
                break
    return merges


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
