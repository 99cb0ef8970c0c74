"""The default model, whole: logits, greedy tokens, tokenizer and chat template against transformers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from dense_reference import greedy_tokens, prompt_logits

from libs.model.chat_template import load_chat_template
from libs.model.load import find_model, load_model
from libs.model.model import Model
from libs.model.tokenizer import Tokenizer, load_tokenizer

PATH = find_model("smollm2-135m-instruct")
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "1, 2, 3, 4,",
    "Write a haiku about the sea.",
    "What is 17 times 3?",
    "Explain gravity to a child.",
    "Die Hauptstadt von Deutschland ist",
    "List three colours:",
    "import numpy as np\n",
    "The quick brown fox",
    "Q: Who wrote Hamlet?\nA:",
    "Dear Sir or Madam,",
    "SELECT name FROM users WHERE",
    "In the year 2050,",
    "Water boils at",
    "<html>\n<body>",
    "My favourite food is",
    "To be, or not to be,",
    "x",
]
TEXTS = [
    *PROMPTS,
    "",
    " ",
    "tabs\tand\nlines\r\n\r\nx",
    "naïve café, Zürich, Straße",
    "日本語 中文 한국어 русский עברית العربية",
    "🤦🏼‍♂️👨‍👩‍👧 emoji",
    "I'm you're THEY'LL don't",
    "e\u0301 combined",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x" * 200,
    "a1b22c333 4444",
    "https://example.org/?q=1&r=%20#top",
    "    indented\n        more",
]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    # Beside other busy processes two threads wait for each other far longer than they compute.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def theirs(one_thread: None) -> Any:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(PATH.parent, gguf_file=PATH.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)


@pytest.fixture(scope="module")
def model(one_thread: None) -> Model:
    return load_model(PATH, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(PATH)


def test_logits_are_those_of_transformers(model: Model, theirs: Any, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("\n".join(PROMPTS) * 3)
    assert len(token_ids) > 400
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    ours = prompt_logits(model, token_ids)
    assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_greedy_tokens_are_those_of_transformers(model: Model, theirs: Any, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    chosen = greedy_tokens(model, prompts, 64)
    assert len({tuple(tokens) for tokens in chosen}) == len(PROMPTS)
    for prompt, tokens in zip(prompts, chosen, strict=True):
        # Each is their most likely one after the tokens before it, so they would choose the same text.
        with torch.no_grad():
            expected = theirs(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :].argmax(-1)
        assert tokens == expected.tolist(), tokenizer.decode(prompt)


def test_greedy_tokens_are_those_that_transformers_generates(
    model: Model, theirs: Any, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPTS[0])
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    generated = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert greedy_tokens(model, [prompt], 24) == [generated[0, len(prompt) :].tolist()]


def test_bfloat16_stays_near_float32(model: Model, tokenizer: Tokenizer) -> None:
    rounded = load_model(PATH, dtype=torch.bfloat16)
    token_ids = tokenizer.encode("The capital of France is")
    exact, near = prompt_logits(model, token_ids), prompt_logits(rounded, token_ids)
    assert (near - exact).pow(2).mean().sqrt() < 0.1 * exact.std()
    assert tokenizer.decode(greedy_tokens(rounded, [token_ids], 2)[0]) == " Paris."
    assert rounded.fingerprint != model.fingerprint


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_are_those_of_transformers(text: str, tokenizer: Tokenizer, their_tokenizer: Any) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == their_tokenizer(text).input_ids
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip) == their_tokenizer.decode(
            token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_spaces_before_digits_differ_from_transformers_which_does_not_cut_digits_off(
    tokenizer: Tokenizer, their_tokenizer: Any
) -> None:
    # The model's own tokenizer.json cuts digits off first, and so does llama.cpp for the file's pre-tokenizer
    # `smollm`; transformers has no entry for it and takes GPT-2's cut. Should that change, this test may go.
    ours, theirs = tokenizer.encode("a   42"), their_tokenizer("a   42").input_ids
    assert [tokenizer.token_bytes(token_id) for token_id in ours] == [b"a", b"   ", b"4", b"2"]
    assert [tokenizer.token_bytes(token_id) for token_id in theirs] == [b"a", b"  ", b" ", b"4", b"2"]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("roles", ["user", "system user", "user assistant user", "system user assistant"])
def test_prompts_are_those_of_transformers(
    roles: str, add_generation_prompt: bool, tokenizer: Tokenizer, their_tokenizer: Any
) -> None:
    messages = [{"role": role, "content": f"{role} says <b>é</b>\n"} for role in roles.split()]
    ours = load_chat_template(PATH).render(messages, add_generation_prompt=add_generation_prompt)
    options = {"add_generation_prompt": add_generation_prompt}
    assert ours == their_tokenizer.apply_chat_template(messages, tokenize=False, **options)
    their_ids = their_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert tokenizer.encode(ours, add_special_tokens=False) == their_ids


def test_special_ids_are_those_of_transformers(
    model: Model, tokenizer: Tokenizer, their_tokenizer: Any, theirs: Any
) -> None:
    assert tokenizer.eos_token_ids == model.config.eos_token_ids == (their_tokenizer.eos_token_id,)
    assert model.config.bos_token_id == their_tokenizer.bos_token_id
    assert tokenizer.vocab_size == len(their_tokenizer) == theirs.config.vocab_size
    added = their_tokenizer.added_tokens_decoder
    assert tokenizer.special_token_ids == {number for number, token in added.items() if token.special}
