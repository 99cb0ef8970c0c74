"""Settings of a store that would hurt are refused before anything starts."""

import pytest

from libs.config.errors import BadSetting
from libs.config.load import load_settings
from services.kv_store.settings import KvStoreSettings


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--name", "."], id="files of this name would lie in the folder of all"),
        pytest.param(["--name", ".."], id="or above it"),
        pytest.param(["--name", "a/b"], id="or in another's"),
        pytest.param(["--memory-gib", "1e9"], id="more memory than there is anywhere"),
        pytest.param(["--disk-gib", "1e12"], id="more bytes than a number holds"),
        pytest.param(["--disk-gib", "nan"], id="no number"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: list[str]) -> None:
    with pytest.raises(BadSetting):
        load_settings(KvStoreSettings, flags, {}, "kv_store")


@pytest.mark.parametrize("name", ["", "store-0", "a.b", ".hidden", "x.."])
def test_other_names_are_taken(name: str) -> None:
    assert load_settings(KvStoreSettings, ["--name", name], {}, "kv_store").name == name
