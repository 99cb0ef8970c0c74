"""A tokenizer from a GGUF file's vocabulary: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`)."""

from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from libs.model.errors import BrokenModel, UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"

# How text is cut before merging: GGUF files only name it, the patterns are from the models' tokenizer.json.
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp's cut for files that name none: no one model's own, but what such files were made for.
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")
_DIGITS_THEN_GPT2: Final = (r"\p{N}", _GPT2)

_CUTS: Final[dict[str, tuple[str, ...]]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS_THEN_GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
_COMPOSED: Final = ("qwen2", "deepseek-r1-qwen", "megrez")  # their tokenizer.json normalises to NFC


def build_gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a file's metadata describes, without what is added around a text.

    Raises:
        BrokenModel: the vocabulary is missing.
        UnsupportedModel: another tokenizer model, or a cut of text that is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model is None or not tokens:
        raise BrokenModel("the GGUF file holds no tokenizer (tokenizer.ggml.tokens); convert the model again")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise UnsupportedModel(
            f"GGUF tokenizer {model!r} is not supported; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece); use the model's Hugging Face directory"
        )
    kinds = _kinds(metadata, tokens)
    tokenizer.add_special_tokens(_added(tokens, kinds, _CONTROL, special=True))
    tokenizer.add_tokens(_added(tokens, kinds, _USER_DEFINED, special=False))
    return tokenizer


def gguf_frame(metadata: dict[str, Any]) -> tuple[bool, bool]:
    """Whether BOS begins and EOS ends a plain text; llama.cpp's defaults where the file does not say."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    begins = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", begins)
    return bool(add_bos), bool(metadata.get("tokenizer.ggml.add_eos_token", False))


def _added(tokens: list[str], kinds: list[int], kind: int, *, special: bool) -> list[AddedToken]:
    """Tokens that are found in the text before anything is cut."""
    return [
        AddedToken(token, normalized=False, special=special)
        for token, its_kind in zip(tokens, kinds, strict=True)
        if its_kind == kind and token
    ]


def _kinds(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise BrokenModel(
            f"the GGUF file has {len(tokens)} tokens but {len(kinds)} token types; convert it again"
        )
    return kinds


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    cut = metadata.get("tokenizer.ggml.pre", "default")
    if cut not in _CUTS:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {cut!r} is not supported; supported are {', '.join(sorted(_CUTS))}; "
            "use the model's Hugging Face directory"
        )
    raw_merges: list[str] | None = metadata.get("tokenizer.ggml.merges")
    if raw_merges is None:
        raise BrokenModel("the GGUF file lacks tokenizer.ggml.merges; convert the model again")
    merges: list[tuple[str, str]] = [
        (left, right) for left, _, right in (merge.partition(" ") for merge in raw_merges)
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=cut in _WHOLE_WORDS_FIRST,
        )
    )
    if cut in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _CUTS[cut]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE as in Llama 2's tokenizer.json; a word begins after each special token."""
    scores: list[float] | None = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise BrokenModel("the GGUF file lacks one tokenizer.ggml.scores per token; convert the model again")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges_by_score(tokens, scores, _kinds(metadata, tokens)),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", _WORD_START)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_WORD_START), escape]) if add_prefix else escape
    )
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """SentencePiece merges neighbours whose union scores best: as a list, all splits, best union first.

    Of the splits of one union the longest left part comes first, which runs of spaces depend on.
    """
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found: list[tuple[float, int, tuple[str, str]]] = []
    for token, score in mergeable.items():
        for cut in range(len(token) - 1, 0, -1):
            pair = (token[:cut], token[cut:])
            if pair[0] in mergeable and pair[1] in mergeable:
                found.append((-score, -cut, pair))
    found.sort()
    return [pair for *_, pair in found]
