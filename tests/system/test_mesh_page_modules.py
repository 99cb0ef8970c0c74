"""Layers, heads and moves on the live page, in a real browser, of a mesh that a test makes up."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import Browser, Page
from gateway_coordinator import (
    DECODE,
    PREFILL,
    at_home,
    candidate,
    done,
    hosted,
    placed,
    record,
    seen,
    told,
)
from page_checks import CARDS, FAINT, LOOKS, TOO_WIDE, UNNAMED, see
from page_scene import Scene, running_scene

from libs.bus.messages.migration import MigrationUpdate
from libs.cost.load import WorkerLoad
from libs.placement.migration import MigrationPhase
from libs.placement.module import heads_of, remote_blocks, whole_layers
from libs.placement.placement import Placement, all_at_owner

pytestmark = pytest.mark.system

DECODE_1, PREFILL_1 = "decode-1-i", "prefill-1-i"
MIXED = (
    at_home()
    .with_module(placed(whole_layers(20, 30), has_weights_at_owner=False))
    .with_module(placed(heads_of(0, 10, (2,)), DECODE_1, "h7c2"))
)
LARGE = (
    all_at_owner(DECODE_1, 80, 32)
    .with_module(placed(whole_layers(70, 80), PREFILL_1, "q"))
    .with_module(placed(heads_of(0, 70, (6, 7)), PREFILL, "q2"))
)


@pytest.fixture(scope="module")
def running() -> Iterator[Scene]:
    with running_scene() as scene:
        yield scene


@pytest.fixture
def scene(running: Scene) -> Scene:
    """All at home again; moves that were told stay, as they do at a gateway."""
    for home in (DECODE, PREFILL, DECODE_1, PREFILL_1):
        running.tell(told(all_at_owner(home, 30, 3)))
    return running


@pytest.fixture
def page(browser: Browser, scene: Scene) -> Iterator[Page]:
    page = browser.new_page()
    page.look(width=1280)
    page.open(scene.url + "/mesh")
    see(page, "!!document.querySelector('.grid')", "the page shows a placement")
    yield page
    page.close()


def label_of(name: str) -> str:
    label = f"document.querySelector('[data-name={name}] .grid').getAttribute('aria-label')"
    return f"{label}.replaceAll('\\u00a0', ' ')"


def fill(scene: Scene) -> None:
    """A mesh in which much goes on."""
    now = time.time()
    moving = record(
        MigrationPhase.CATCHING_UP, "mm", module=heads_of(0, 20, (1,)), host=PREFILL_1,
        phase_seconds={"reserving": 0.021, "copying": 0.84}, num_kv_bytes=9 << 20, num_rounds=2,
        started_unix_seconds=now - 1.2, reason="manual",
    )  # fmt: skip
    failed = record(
        MigrationPhase.FAILED, "ff", error="prefill-1 has no room for 500 blocks: 312 at the most " * 3,
        started_unix_seconds=now - 90, ended_unix_seconds=now - 89,
    )  # fmt: skip
    ended = done(move_id="dd", started_unix_seconds=now - 60, ended_unix_seconds=now - 58, reason="manual")
    refused = candidate("adds 2.1 ms to each step, more than its latency target leaves")
    scene.coordinator.rounds = [
        seen(412, unix_seconds=now, candidates=(refused, candidate()), decision="moved KV heads 1 " * 8)
    ]
    scene.tell(told(MIXED, moves=(moving, failed, ended)), told(LARGE))
    scene.tell(told(at_home(PREFILL), hosted=(hosted(whole_layers(20, 30)),)))
    scene.load("decode-0", WorkerLoad(num_blocks=1200, num_used_blocks=900, block_size=16, away_share=0.04))
    busy = WorkerLoad(num_blocks=800, busy_share=0.3, hosted_busy_share=0.12, num_hosted_bytes=64 << 20)
    scene.load("prefill-0", busy)


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_modules_and_moves_are_readable_and_named(
    scene: Scene, page: Page, tmp_path: Path, width: int, dark: bool
) -> None:
    fill(scene)
    page.look(width=width, dark=dark)
    see(page, "document.querySelector('#loop summary').innerText", "the loop's last round")
    see(page, f"{label_of('decode-1')}.includes('80 layers')", "the large instance")
    page.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.ask(TOO_WIDE) == []
    assert page.ask(UNNAMED) == 0
    assert page.ask(FAINT) == []
    assert page.complaints == []
    assert {url.startswith((scene.url + "/", "data:")) for url in page.requested_urls} == {True}
    page.screenshot(tmp_path / "modules.png")
    scene.tell(MigrationUpdate(record=done(move_id="mm")))


def test_the_picture_says_in_words_what_it_shows(scene: Scene, page: Page) -> None:
    home = "decode-0: 30 layers across, 3 KV heads down; all at home"
    see(page, f"{label_of('decode-0')} === {home!r}", "a name")
    scene.tell(told(MIXED), told(at_home(PREFILL), hosted=(hosted(whole_layers(20, 30)),)))
    said = see(
        page,
        f"{label_of('decode-0')}.includes('at prefill-0') && {label_of('decode-0')}",
        "what is away has its place",
    )
    assert said.endswith("layers 20-29 at prefill-0, with their weights; KV head 2 of layers 0-9 at decode-1")
    hosting = "document.querySelector('[data-name=prefill-0] .said').innerText"
    assert "runs layers 20-29 of decode-0 here, in 64" in see(page, hosting, "what the host runs")


def test_blocks_that_are_lent_are_told(scene: Scene, page: Page) -> None:
    scene.tell(told(at_home().with_module(placed(remote_blocks(30), num_blocks=70))))
    see(page, f"{label_of('decode-0')}.includes('prefill-0 lends 70')", "the lent blocks")


PARTS = """(async () => {
  const { partsOf } = await import('/mesh/placement.js');
  return INSTANCES.map(([instance, moving]) => partsOf(instance, moving));
})()"""


def placements_made_up() -> list[Placement]:
    modules = [
        (), (whole_layers(20, 30),), (whole_layers(0, 1),), (heads_of(0, 30, (1,)),),
        (heads_of(4, 9, (0, 2)),),
        (whole_layers(3, 5), whole_layers(5, 9), heads_of(9, 12, (2,)), heads_of(10, 30, (0,))),
    ]  # fmt: skip
    made: list[Placement] = []
    for number, several in enumerate(modules):
        placement = all_at_owner("h", 30, 3)
        for at, module in enumerate(several):
            placement = placement.with_module(placed(module, f"w{(number + at) % 3}", f"m{at}"))
        made.append(placement)
    return made


def document_of(placement: Placement) -> dict[str, Any]:
    layers = [{"first": r.first, "end": r.end, "worker": r.worker} for r in placement.layer_runs()]
    heads = [
        {"first": m.first_layer, "end": m.end_layer, "kv_heads": m.kv_heads, "worker": one.worker}
        for one in placement.placed
        if (m := one.module).kv_heads
    ]
    return {"name": "h", "num_layers": 30, "num_kv_heads": 3, "layers": layers, "heads": heads}


def test_the_rectangles_cover_each_layer_and_head_once_with_its_holder(page: Page) -> None:
    made = placements_made_up()
    script = PARTS.replace("INSTANCES", json.dumps([(document_of(one), []) for one in made]))
    for placement, parts in zip(made, page.ask(script), strict=True):
        covered = {
            (layer, head): part["worker"]
            for part in parts
            for layer in range(part["first"], part["end"])
            for head in range(part["head"], part["endHead"])
        }
        num_cells = sum((p["end"] - p["first"]) * (p["endHead"] - p["head"]) for p in parts)
        assert num_cells == len(covered) == 90
        at_home = {slot for slot, worker in covered.items() if worker == "h"}
        assert at_home == set(placement.resident_slots())
        for one in placement.placed:
            assert {covered[slot] for slot in one.module.slots(3)} == {one.worker}


def test_what_is_on_its_way_is_a_rectangle_of_its_own_with_its_goal(page: Page) -> None:
    moving = {
        "is_return": False,
        "host": "w",
        "host_name": "",
        "module": msgspec.to_builtins(heads_of(5, 9, (1,))),
    }
    script = PARTS.replace("INSTANCES", json.dumps([(document_of(all_at_owner("h", 30, 3)), [moving])]))
    (parts,) = page.ask(script)
    assert [p for p in parts if p["to"]] == [
        {"first": 5, "end": 9, "head": 1, "endHead": 2, "worker": "h", "to": "w"}
    ]


def test_a_move_is_seen_phase_by_phase_and_then_among_those_that_ended(scene: Scene, page: Page) -> None:
    now = time.time()
    facts: dict[str, Any] = {"move_id": "live-1", "with_weights": True, "started_unix_seconds": now}
    facts["num_total_bytes"] = 48 << 20
    current = "document.querySelector('#under-way [data-id=live-1] [aria-current=step] span').textContent"
    for phase, shown, took in (
        (MigrationPhase.RESERVING, "reserve", {}),
        (MigrationPhase.COPYING, "copy", {"reserving": 0.02}),
        (MigrationPhase.SWITCHING, "switch", {"reserving": 0.02, "copying": 1.25, "catching_up": 0.5}),
    ):
        scene.tell(MigrationUpdate(record=record(phase, phase_seconds=took, num_kv_bytes=12 << 20, **facts)))
        there = "document.querySelector('#under-way [data-id=live-1] [aria-current=step]')"
        see(page, f"!!{there} && {current} === {shown!r}", f"the move is at {shown}")
    card = page.ask("document.querySelector('#under-way [data-id=live-1]').innerText").replace("\u00a0", " ")
    for said in ("layers 20-29 of decode-0 to prefill-0 (migrate)", "1.25 s", "25 % of 48 MiB", "KV 12 MiB"):
        assert said in card
    see(page, f"{label_of('decode-0')}.includes('on the way to prefill-0')", "where it goes")
    scene.tell(MigrationUpdate(record=done(**facts | {"ended_unix_seconds": now + 2})))
    line = "document.querySelector('#ended [data-id=live-1]')"
    see(page, f"!!{line} && !document.querySelector('#under-way [data-id=live-1]')", "it has ended")
    said = page.ask(f"{line}.innerText").replace("\u00a0", " ")
    for words in ("✓ done", "in 2.00 s", "pause 8.3 ms", "weights 70 MiB", "800 → 1,200 blocks (+50 %)"):
        assert words in said


def test_a_move_that_is_rolled_back_says_why_as_text(scene: Scene, page: Page) -> None:
    evil = "<img src=x onerror=alert(1)>"
    facts: dict[str, Any] = {"move_id": "live-2", "started_unix_seconds": time.time()}
    scene.tell(MigrationUpdate(record=record(MigrationPhase.ROLLING_BACK, **facts)))
    see(page, "!!document.querySelector('#under-way [data-back=true]')", "it is rolled back")
    ended = time.time()
    facts |= {"ended_unix_seconds": ended, "num_blocks_before": 800, "num_blocks_after": 800}
    scene.tell(MigrationUpdate(record=record(MigrationPhase.FAILED, error=evil, **facts)))
    line = "document.querySelector('#ended [data-id=live-2]')"
    said = see(page, f"{line} && {line}.innerText", "it has failed").replace("\u00a0", " ")
    assert "✕ rolled back" in said
    assert "800 blocks as before" in said
    assert page.ask(f"{line}.querySelector('.error').textContent") == evil
    assert page.ask("document.querySelectorAll('img').length") == 0


def test_the_loops_last_round_is_told_and_that_nobody_leads(scene: Scene, page: Page) -> None:
    refused = candidate("its link is too slow", what="layers 20-29")
    scene.coordinator.rounds = [seen(77, unix_seconds=time.time(), candidates=(refused, candidate()))]
    loop = "document.getElementById('loop').innerText"
    see(page, f"{loop}.includes('Round 77')", "the loop's last round")
    page.ask("document.querySelector('#loop details').open = true")
    said = page.ask(loop).replace("\u00a0", " ")
    for words in (
        "stayed: nothing is worth its cost",
        "coordinator-0 leads; it moves modules by itself",
        "load 0.80: compute 90 %, memory 80 %, queue 50 %",
        "decode-0: layers 20-29 to prefill-0",
        "its link is too slow",
        "benefit 0.31, cost 0.050, takes 0.40 s, adds 2.1 ms to a step",
    ):
        assert words in said
    scene.coordinator_leaves()
    see(page, f"{loop}.includes('No coordinator leads now')", "nobody leads")
    scene.coordinator_comes()
    see(page, f"{loop}.includes('Round 77')", "somebody leads again")


def test_who_works_for_others_and_who_waits_for_others_says_how_much(scene: Scene, page: Page) -> None:
    busy = WorkerLoad(num_blocks=800, busy_share=0.3, hosted_busy_share=0.12, num_hosted_bytes=64 << 20)
    scene.load("prefill-1", busy)
    scene.load("decode-1", WorkerLoad(num_blocks=800, away_share=0.25))
    see(page, f"({CARDS})['prefill-1'].includes('12 %, 64 MiB')", "what the host does for others")
    cards = see(page, f"({CARDS})['decode-1'].includes('25 %') && ({CARDS})", "how long the home waits")
    assert "waits for others" in cards["decode-1"]
    assert "for others" not in cards["decode-0"].replace("waits for others", "")


def test_letters_are_kept_while_a_worker_is_away(page: Page) -> None:
    script = """(async () => {
      const { Workers } = await import('/mesh/workers.js');
      const workers = new Workers();
      workers.hear(['decode-10', 'decode-2']);
      workers.hear(['prefill-0', 'decode-10']);
      workers.hear([...Array(60).keys()].map((n) => `w-${n}`));
      const [letters, colours] = [['decode-10', 'w-49'], ['w-5']];
      const told = [letters.map((n) => workers.letter(n)), colours.map((n) => workers.colour(n))];
      return [workers.names.slice(0, 3), ...told];
    })()"""
    assert page.ask(script) == [["decode-2", "decode-10", "prefill-0"], ["B", "A"], ["w0"]]
