"""The gateway runs without torch: what it imports must not need it."""

import subprocess
import sys

import pytest

MODULES = ("config", "source", "tokenizer", "chat_template", "errors")


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_without_torch(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import libs.model.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_default_models_tokenizer_and_template_load_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from libs.model.source import find_model\n"
        "from libs.model.tokenizer import load_tokenizer\n"
        "from libs.model.chat_template import load_chat_template\n"
        "path = find_model('smollm2-135m-instruct')\n"
        "prompt = load_chat_template(path).render([{'role': 'user', 'content': 'hi'}])\n"
        "print(len(load_tokenizer(path).encode(prompt, add_special_tokens=False)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20
