"""Salts and names made from API keys: apart where they must be, equal where they must be, telling nothing."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.auth import ANONYMOUS, Tenants, salt_of, session_of, tenant_of

TEXT = st.text(max_size=20)


def test_the_holder_of_a_key_is_found_and_nobody_else() -> None:
    tenants = Tenants(["one", "two"])
    assert tenants.find(b"one") == tenant_of("one")
    assert tenants.find(b"two") == tenant_of("two")
    for given_key in (b"", b"on", b"onee", b"three", b"\xff"):
        assert tenants.find(given_key) is None
    assert tenants.need_keys
    assert not Tenants([]).need_keys


@given(TEXT, TEXT, TEXT, TEXT)
def test_two_requests_share_a_salt_if_key_and_request_salt_are_both_equal(
    key: str, other_key: str, salt: str, other_salt: str
) -> None:
    one, other = salt_of(tenant_of(key), salt), salt_of(tenant_of(other_key), other_salt)
    assert (one == other) == ((key, salt) == (other_key, other_salt))


@given(TEXT, TEXT)
def test_no_request_without_a_key_can_name_the_salt_of_a_tenant(key: str, salt: str) -> None:
    theirs = salt_of(tenant_of(key), salt)
    for guess in (theirs, tenant_of(key).secret, tenant_of(key).name, key, salt):
        assert salt_of(ANONYMOUS, guess) != theirs


def test_without_key_and_salt_all_share() -> None:
    assert salt_of(ANONYMOUS, "") == ""
    assert salt_of(ANONYMOUS, "a") == salt_of(ANONYMOUS, "a") != salt_of(ANONYMOUS, "b")


@given(st.text("abcdefgh", min_size=8, max_size=30))
def test_nothing_that_travels_holds_the_key_or_leads_from_one_to_the_other(key: str) -> None:
    tenant = tenant_of(key)
    travels = (tenant.name, salt_of(tenant, ""), salt_of(tenant, "x"), session_of(tenant, "x"))
    assert len(set(travels)) == 4
    for word in travels:
        assert key not in word
        assert tenant.secret not in word
        assert not tenant.secret.startswith(word)


def test_salts_are_the_same_after_a_restart_so_that_blocks_on_disk_are_found() -> None:
    assert salt_of(tenant_of("sk-known"), "") == "86b34ff31321998ace5cba49c9aacdc5"
    assert salt_of(ANONYMOUS, "s") == "0fc9f641ee5413cfc20b3fe249d392e6"


def test_a_conversation_is_apart_from_other_tenants_and_of_one_length() -> None:
    one, two = tenant_of("one"), tenant_of("two")
    assert session_of(one, "chat") == session_of(one, "chat") != session_of(two, "chat")
    assert session_of(ANONYMOUS, "") == session_of(one, "") == ""
    assert len(session_of(ANONYMOUS, "x" * 100_000)) == len(session_of(ANONYMOUS, "é"))
