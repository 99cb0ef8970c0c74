"""Chat templates: found in every place, rendered as transformers does, failures told clearly."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from libs.model.chat_template import CHATML, ChatTemplate, load_chat_template
from libs.model.errors import BrokenModel, TemplateError
from libs.model.source import find_model

HELLO = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Wie heißt du? 你好"},
    {"role": "assistant", "content": "  Ich.\n"},
    {"role": "user", "content": ""},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "d": "<é>"}}}]
EACH = "{% for m in messages %}"
TEMPLATES = {
    "chatml": CHATML,
    "blocks are trimmed": EACH
    + "\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend",
    "json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true) }}",
    "loop controls": EACH + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation blocks": EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "absent names": "{{ bos_token }}{{ nothing }}{% if tools is none %}no tools{% endif %}{{ documents }}",
    "own names": "{{ enable_thinking }}{% if add_generation_prompt %}go{% endif %}",
    "macro": "{% macro say(m) %}[{{ m['role'] }}]{% endmacro %}" + EACH + "{{ say(m) }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [HELLO, TALK])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_renders_as_in_transformers(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, {"bos_token": "<s>"}).render(messages, tools=tools, enable_thinking=False)
    render: Any = render_jinja_template
    theirs, _ = render(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
        enable_thinking=False,
    )
    assert ours == theirs[0]


def test_the_generation_prompt_can_be_left_out() -> None:
    template = ChatTemplate(CHATML, {})
    prompt = template.render(HELLO, add_generation_prompt=False)
    assert template.render(HELLO) == prompt + "<|im_start|>assistant\n"


def test_todays_date_is_there() -> None:
    template, before = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}), datetime.now()
    text = template.render(HELLO)
    assert text in {time.strftime("%Y-%m-%d") for time in (before, datetime.now())}


@pytest.mark.parametrize(
    ("source", "messages", "complaint"),
    [
        ("{{ raise_exception('Roles must alternate') }}", HELLO, "Roles must alternate"),
        ("{{ messages[0].content.strip() }}", [{"role": "user"}], "content"),
        ("{{ '<' + messages[0]['content'] }}", [{"role": "user", "content": None}], "NoneType"),
        ("{{ messages[5]['role'] }}", HELLO, "list object has no element 5"),
        ("{{ messages[0]['content'] / 0 }}", [{"role": "user", "content": 1}], "division by zero"),
        ("{{ messages | tojson }}", [{"role": "user", "content": {1, 2}}], "not JSON serializable"),
        ("{{ ''.__class__.__mro__ }}", HELLO, "unsafe"),
        ("{{ messages.append(1) }}", HELLO, "unsafe|not safely callable"),
    ],
)
def test_failures_of_a_template_become_one_kind_of_error(
    source: str, messages: list[dict[str, Any]], complaint: str
) -> None:
    with pytest.raises(TemplateError, match=complaint):
        ChatTemplate(source, {}).render(messages)


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(BrokenModel, match="not valid"):
        ChatTemplate("{% for %}", {})


def test_a_model_without_a_template_refuses_chat() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(None, {}).render(HELLO)


# Where it is found


def directory(tmp_path: Path, **settings: Any) -> Path:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_template_file_goes_before_the_one_in_tokenizer_config(tmp_path: Path) -> None:
    directory(tmp_path, chat_template="config {{ bos_token }}", bos_token={"content": "<s>"})
    assert load_chat_template(tmp_path).render(HELLO) == "config <s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_chat_template(tmp_path).render(HELLO) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja ü", encoding="utf-8")
    assert load_chat_template(tmp_path).render(HELLO) == "jinja ü"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    assert load_chat_template(directory(tmp_path, chat_template=named)).render(HELLO) == "plain"


@pytest.mark.parametrize(
    ("added", "has_chatml"), [(["<|im_start|>", "<|im_end|>"], True), (["<|im_end|>"], False), ([], False)]
)
def test_without_a_template_chatml_is_taken_where_the_vocabulary_has_it(
    added: list[str], has_chatml: bool, tmp_path: Path
) -> None:
    tokens = [{"content": token} for token in added]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert load_chat_template(directory(tmp_path)).source == (CHATML if has_chatml else None)


def test_the_default_model_has_its_own_template() -> None:
    prompt = load_chat_template(find_model("smollm2-135m-instruct")).render(HELLO)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
