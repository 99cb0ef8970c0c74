"""The live page of a real mesh in a real browser, as people see it at two widths, in light and dark."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from browser import Browser, Page
from meshes import ADMIN_KEY, KEY
from page_checks import CARDS, CONNECTION, FAINT, LOOKS, TOO_WIDE, UNNAMED, see

from black_box import Mesh, until

MESH = "page"
pytestmark = pytest.mark.system

PROMPT = "Rivers and the cities they flow through, with short notes on each of them. " * 8


def give_key(page: Page, key: str) -> None:
    see(page, "!document.getElementById('key-form').hidden", "the page asks for the key")
    page.ask(f"document.getElementById('key').value = {key!r}")
    page.ask("document.querySelector('#key-form button').click()")


def see_on_card(page: Page, name: str, words: str) -> None:
    """A service is on the page before its load is heard of."""
    see(page, f"({CARDS})[{name!r}]?.includes({words!r})", f"{words} on the card of {name}")


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def show(page: Page, mesh: Mesh, **look: Any) -> None:
    page.look(**look)
    page.open(mesh.url + "/mesh")
    give_key(page, KEY)
    see(page, "!!document.querySelector('article')", "the page shows the mesh")
    see_live(page)


def see_live(page: Page) -> None:
    see(page, f"{CONNECTION} === 'live'", "the page follows the mesh")


def test_the_page_asks_for_the_key_and_shows_nothing_without_the_right_one(mesh: Mesh, page: Page) -> None:
    page.look(width=400)
    page.open(mesh.url + "/mesh")
    give_key(page, "sk-wrong")
    see(page, "document.getElementById('key-said').textContent", "the page says that the key is wrong")
    assert page.ask("!!document.querySelector('article')") is False
    give_key(page, KEY)
    see(page, "!!document.querySelector('article')", "the page shows the mesh")


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_everybody_is_on_the_page_readable_and_nothing_comes_from_elsewhere(
    mesh: Mesh, page: Page, tmp_path: Path, width: int, dark: bool
) -> None:
    show(page, mesh, width=width, dark=dark)
    cards = see(page, CARDS, "cards")
    assert {name: "ready" in said for name, said in cards.items()} == dict.fromkeys(
        ("gateway", "router-0", "prefill-0", "store-0", "decode-0"), True
    )
    see(
        page,
        "document.querySelectorAll('#way [role=img]').length === 2",
        "both workers have told their loads",
    )
    for name in ("prefill-0", "decode-0"):
        for label in ("busy", "memory", "of 256 blocks", "queue", "tokens/s"):
            see_on_card(page, name, label)
    for label in ("memory", "disk", "GiB", "hit rate"):
        see_on_card(page, "store-0", label)
    assert page.ask(TOO_WIDE) == []
    assert page.ask(UNNAMED) == 0
    page.ask("document.getElementById('words').open = true")
    assert page.ask(FAINT) == []
    assert page.ask("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 21, 27)" if dark else "rgb(246, 247, 249)"
    )
    assert {url.startswith((mesh.url + "/", "data:")) for url in page.requested_urls} == {True}
    assert [said for said in page.complaints if "401" not in said] == []
    page.screenshot(tmp_path / "page.png")


def test_the_figures_move_with_the_work(mesh: Mesh, page: Page) -> None:
    show(page, mesh, width=1280)
    see_on_card(page, "store-0", "0 B of")
    with openai.OpenAI(base_url=mesh.url + "/v1", api_key=KEY, max_retries=0) as client:
        with client.completions.create(
            model=mesh.model,
            prompt=PROMPT,
            max_tokens=800,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream:
            next(iter(stream))
            see(
                page,
                f"/[1-9]\\d* running/.test(({CARDS})['decode-0'])",
                "the decode worker has a sequence",
            )
        see(page, f"/[1-9]\\d* blocks/.test(({CARDS})['store-0'])", "the store has blocks")
    drawn = "document.querySelectorAll('polyline'), (line) => line.getAttribute('points').includes(' ')"
    see(page, f"((drawn) => drawn.length && drawn.every(Boolean))(Array.from({drawn}))", "lines of each rate")


def test_heads_that_move_are_seen_moving_and_at_their_new_place(mesh: Mesh, page: Page) -> None:
    show(page, mesh, width=1280)
    see(page, "!!document.querySelector('[data-name=decode-0] .grid')", "the picture of the instance")
    picture = "document.querySelector('[data-name=decode-0] .grid').getAttribute('aria-label')"
    assert "all at home" in see(page, picture, "what it shows")
    heads = {"instance": "decode-0", "host": "prefill-0", "kv_heads": [2], "layers": [0, 3]}
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.post(mesh.url + "/v1/mesh/migrations", json=heads, headers=headers)
    assert answer.status_code == 202, answer.text
    ended = "document.querySelector('#ended').innerText"
    said = see(page, ended, "the move is over")
    assert "KV head 2 of layers 0-2 of decode-0 to prefill-0" in said
    assert "done" in said, said
    see(page, f"{picture}.includes('KV head 2 of layers 0-2 at prefill-0')", "the heads are there")
    see(page, f"({CARDS})['prefill-0'].includes('for others')", "the host tells what it holds")


def test_a_service_that_dies_is_gone_and_its_successor_is_ready(mesh: Mesh, page: Page) -> None:
    show(page, mesh, width=400, still=True)
    assert page.ask("getComputedStyle(document.querySelector('.fill')).transitionDuration") == "0s"
    answer = httpx.get(mesh.url + "/v1/mesh", headers={"authorization": f"Bearer {KEY}"})
    router = next(s for s in answer.raise_for_status().json()["services"] if s["kind"] == "router")
    os.kill(router["pid"], signal.SIGKILL)
    changes = "[...document.querySelectorAll('#changes li')].map((line) => line.innerText).join('; ')"
    see(page, f"({changes}).includes('router-0 is gone')", "the page tells that the router is gone")
    see(page, f"({CARDS})['router-0'].includes('ready')", "its successor is shown", within_seconds=60)
    see(page, "document.getElementById('reasons').hidden", "requests can be served again")
    assert page.ask("document.querySelectorAll('[data-kind=router] article').length") == 1


def test_a_tab_that_nobody_looks_at_gives_its_connection_back(mesh: Mesh, page: Page) -> None:
    show(page, mesh, width=400)

    def until_viewers(num: int) -> None:
        said = f"kvmesh_mesh_viewers {num}.0"
        until(lambda: said in httpx.get(mesh.url + "/metrics").text, timeout_seconds=30, what=said)

    until_viewers(1)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true})"
    for hidden, num_viewers in (("true", 0), ("false", 1)):
        page.ask(f"{hide % hidden}; document.dispatchEvent(new Event('visibilitychange'))")
        until_viewers(num_viewers)
    see_live(page)


# The page's own modules, in the browser that runs them, on figures made up here

REMEMBER = """(async () => {
  const { Memory, recentHitShare } = await import('/mesh/memory.js');
  const memory = new Memory(), steps = STEPS;
  for (const [now, services] of steps) memory.hear({ services }, now);
  return {
    cards: [...memory.services.values()].map((s) => [s.incarnation, s.state, s.points.length]),
    changes: memory.changes.map((change) => change.text),
    lately: [...memory.services.values()].map((s) => recentHitShare(s, 0)),
  };
})()"""
DRAW = """(async () => {
  const { drawCards } = await import('/mesh/cards.js');
  const list = document.createElement('div');
  for (const services of STEPS) drawCards(list, services.map((s) => ({ points: [], ...s })));
  return [...list.children].map((card) => ({
    texts: [...card.querySelectorAll('.name, .state, .detail, .label, .text')].map(
      (e) => e.textContent.replaceAll('\\u00a0', ' ')).filter((text) => text),
    shares: [...card.querySelectorAll('[role=meter]')].map((e) => e.getAttribute('aria-valuenow')),
  }));
})()"""


def run(page: Page, mesh: Mesh, script: str, steps: list[Any]) -> Any:
    page.open(mesh.url + "/mesh")
    return page.ask(script.replace("STEPS", json.dumps(steps)))


def service(name: str = "decode-0", incarnation: str = "a", **facts: Any) -> dict[str, Any]:
    kind = "kv_store" if name.startswith("store") else f"{name.partition('-')[0]}_worker"
    told = {
        "kind": kind,
        "name": name,
        "incarnation": incarnation,
        "state": "ready",
        "detail": "",
        "load": None,
    }
    return {**told, "load_age_seconds": 0.1, **facts}


def load(**figures: Any) -> dict[str, Any]:
    names = ("num_running", "num_waiting", "num_reserved", "num_waiting_tokens", "num_blocks")
    return {**dict.fromkeys((*names, "num_used_blocks", "tokens_per_second", "busy_share"), 0), **figures}


def tier(
    name: str = "dram", num_hit_blocks: int = 0, num_asked_blocks: int = 0, **facts: Any
) -> dict[str, Any]:
    sizes = {"num_blocks": 1, "num_bytes": 1 << 29, "capacity_bytes": 1 << 30, "is_paused": False}
    hits = {"num_hit_blocks": num_hit_blocks, "num_asked_blocks": num_asked_blocks}
    return {"tier": name, **sizes, **hits, **facts}


def test_who_was_here_from_the_start_is_no_news_and_who_starts_or_drains_is(mesh: Mesh, page: Page) -> None:
    other = service("prefill-0", "b", state="starting", detail="loading weights")
    told = run(page, mesh, REMEMBER, [[0, [service(), other]], [1000, [service(state="draining"), other]]])
    assert told["changes"] == ["decode-0 is draining", "prefill-0 is starting: loading weights"]


def test_who_left_stays_for_a_minute_or_until_replaced(mesh: Mesh, page: Page) -> None:
    gone = [[0, [service()]], [1000, []], [2000, []]]
    told = run(page, mesh, REMEMBER, gone)
    assert (told["cards"], told["changes"]) == ([["a", "gone", 0]], ["decode-0 is gone"])
    assert run(page, mesh, REMEMBER, [*gone, [62000, []]])["cards"] == []
    replaced = run(page, mesh, REMEMBER, [*gone, [3000, [service(incarnation="b")]]])
    assert replaced["cards"] == [["b", "ready", 0]]
    assert replaced["changes"] == ["decode-0 is ready", "decode-0 is gone"]


def test_a_minute_of_rates_is_kept_a_point_a_second_and_none_over_a_gap(mesh: Mesh, page: Page) -> None:
    beats = [[at, [service(load=load())]] for at in range(1000, 100_000, 500)]
    assert run(page, mesh, REMEMBER, beats)["cards"] == [["a", "ready", 60]]
    assert run(page, mesh, REMEMBER, [*beats, [200_000, [service(load=load())]]])["cards"][0][2] == 1


def test_the_late_hit_rate_is_that_of_the_last_minute(mesh: Mesh, page: Page) -> None:
    counts = [(at, at // 4) for at in range(0, 100, 10)] + [(100 + 10 * at, 25 + 10 * at) for at in range(60)]
    beats = [
        [
            1000 * (at + 1),
            [service("store-0", load={"tokens_per_second": 0, "tiers": [tier("dram", hits, asked)]})],
        ]
        for at, (asked, hits) in enumerate(counts)
    ]
    assert run(page, mesh, REMEMBER, beats[:1])["lately"] == [None]
    assert run(page, mesh, REMEMBER, beats)["lately"] == [1]


def test_cards_say_in_words_and_bars_what_workers_and_stores_do(mesh: Mesh, page: Page) -> None:
    busy = load(num_running=2, num_waiting=3, num_reserved=1, num_waiting_tokens=1024, busy_share=0.5)
    busy |= {"num_blocks": 200, "num_used_blocks": 50, "tokens_per_second": 1234.5}
    tiers = [tier("dram", 1, 4), tier("disk", 0, 0, is_paused=True, num_bytes=0, num_blocks=2000)]
    services = [
        service("prefill-0", "p", load=busy),
        service("decode-0", "d", load=busy, num_seats=16, load_age_seconds=7.2),
        service("store-0", "s", load=load(tiers=tiers), state="draining"),
        service("decode-1", "x", state="gone", goneAfter="ready"),
    ]
    prefill, decode, store, gone = run(page, mesh, DRAW, [services[:1], services])
    assert prefill["texts"] == [
        *("prefill-0", "● ready", "busy", "50 %, 2 running", "memory", "50 of 200 blocks"),
        *("queue", "1,024 tokens, 4 prompts", "tokens/s", "1,234.5"),
    ]
    assert prefill["shares"] == decode["shares"] == ["50", "25", "25"]
    assert decode["texts"][2] == "nothing heard of its load for 7 s"
    assert "4 sequences" in decode["texts"]
    assert store["texts"] == [
        *("store-0", "◑ draining", "memory", "512 MiB of 1.0 GiB, 1 block", "hit rate, memory", "25 %"),
        *("disk, paused", "0 B of 1.0 GiB, 2,000 blocks", "hit rate, disk", "not asked yet"),
    ]
    assert store["shares"] == ["50", "25", "0", "0"]
    assert gone["texts"] == ["decode-1", "✕ gone", "left or died; others take over"]


def test_names_and_details_are_text_whatever_they_hold(mesh: Mesh, page: Page) -> None:
    evil = "<img src=x onerror=alert(1)>"
    (card,) = run(page, mesh, DRAW, [[service(evil, detail=evil)]])
    assert card["texts"] == [evil, "● ready", evil]


def test_cards_are_changed_in_place_put_in_order_and_taken_away(mesh: Mesh, page: Page) -> None:
    one, two = service("decode-1", "a"), service("decode-2", "b", load=load())
    names = [
        [card["texts"][0] for card in run(page, mesh, DRAW, steps)]
        for steps in ([[two], [one, two]], [[one, two], [two]], [[one], []])
    ]
    assert names == [["decode-1", "decode-2"], ["decode-2"], []]
