"""Orders, cancellations, weights that travel, and hosts that leave."""

import asyncio
import itertools

import pytest
from moves_scene import HOST_BLOCKS, moving_mesh
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.bus.messages.migration import DenialReason, MigrationAccepted, MigrationDenied
from libs.placement.migration import MigrationPhase
from libs.placement.module import heads_of, remote_blocks, whole_layers
from libs.telemetry.traces import configure_traces

LIVE_PHASES = ("planned", "reserving", "copying", "catching_up", "switching", "releasing")
SLOW = 0.15
"""MiB per second: a move takes seconds."""


def reason(answer: MigrationAccepted | MigrationDenied) -> DenialReason:
    assert isinstance(answer, MigrationDenied), answer
    return answer.reason


async def test_phases_follow_each_other_and_the_record_says_what_was_done() -> None:
    async with moving_mesh(host={"num_blocks": 600}) as scene:
        streams = await scene.begin(4, 200)
        away = await scene.away(heads_of(0, 3, (1,)), reason="by hand")
        phases = itertools.groupby(one.phase.value for one in scene.told[away.move_id])
        assert [phase for phase, _ in phases] == [*LIVE_PHASES, "done"]
        assert (away.instance_name, away.host_name, away.reason) == ("decode-0", "decode-1", "by hand")
        assert (away.expected_epoch, away.epoch) == (0, 1)
        assert away.num_blocks_before == 256 < away.num_blocks_after
        assert away.pause_seconds > 0
        assert away.num_total_bytes == away.num_kv_bytes > 0
        assert away.started_unix_seconds < away.ended_unix_seconds
        assert set(away.phase_seconds) == set(LIVE_PHASES)
        back = await scene.back(away.move_id)
        assert (back.num_blocks_before, back.num_blocks_after) == (away.num_blocks_after, 256)
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_metrics_and_placements_tell_of_a_move() -> None:
    async with moving_mesh() as scene:
        streams = await scene.begin(2, 60)
        away = await scene.away(whole_layers(1, 3))
        home, host = scene.home, scene.host
        await scene.mesh.until(lambda: home.gauge("kvmesh_migrations_total", outcome="done") == 1)
        assert home.gauge("kvmesh_migration_bytes_total", what="kv") == away.num_kv_bytes
        assert home.gauge("kvmesh_migration_phase_seconds_count", phase="copying") == 1
        assert home.gauge("kvmesh_placement_epoch") == 1
        assert home.gauge("kvmesh_num_blocks") == away.num_blocks_after
        assert host.gauge("kvmesh_hosted_modules") == 1
        assert host.gauge("kvmesh_hosted_bytes") > 0
        await scene.mesh.until(lambda: host.gauge("kvmesh_hosted_step_seconds_count") > 0)
        await scene.mesh.until(lambda: len(scene.told_placement(home).placed) == 1)
        await scene.mesh.until(
            lambda: (
                host.incarnation in scene.placements and len(scene.placements[host.incarnation].hosted) == 1
            )
        )
        (hosted,) = scene.placements[host.incarnation].hosted
        assert (hosted.owner, hosted.move_id, hosted.module) == (
            home.incarnation,
            away.move_id,
            whole_layers(1, 3),
        )
        await scene.check(streams)


async def test_an_order_that_comes_twice_moves_once() -> None:
    async with moving_mesh() as scene:
        for _ in range(2):
            assert isinstance(await scene.start(whole_layers(0, 1), move_id="one"), MigrationAccepted)
        await scene.end("one")
        again = await scene.start(whole_layers(0, 1), move_id="one", expected_epoch=0)
        assert isinstance(again, MigrationAccepted)
        assert scene.placement.epoch == 1


async def test_a_stale_epoch_is_refused_with_the_one_in_force() -> None:
    async with moving_mesh() as scene:
        await scene.away(whole_layers(0, 1))
        refused = await scene.start(whole_layers(1, 2), expected_epoch=0)
        assert reason(refused) is DenialReason.STALE_EPOCH
        assert refused.epoch == 1


async def test_one_move_at_a_time() -> None:
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        streams = await scene.begin(4, 100)
        first = await scene.start(whole_layers(0, 1))
        await scene.until(
            first.move_id if isinstance(first, MigrationAccepted) else "", MigrationPhase.COPYING
        )
        assert reason(await scene.start(whole_layers(1, 2))) is DenialReason.BUSY
        await scene.abandon("move-1")
        await scene.end("move-1")
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_a_worker_that_hosts_nothing_is_no_destination() -> None:
    async with moving_mesh(host={"hosting": False}) as scene:
        assert reason(await scene.start(whole_layers(0, 1))) is DenialReason.INVALID


async def test_a_host_without_room_fails_the_move_and_nothing_else() -> None:
    async with moving_mesh(host={"num_blocks": 129}) as scene:  # one sequence of full length takes 128
        streams = await scene.begin(3, 60)
        record = await scene.move(whole_layers(0, 2))
        assert record.phase is MigrationPhase.FAILED
        assert "blocks" in record.error
        assert record.num_blocks_after == record.num_blocks_before == 256
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_a_head_that_leaves_gives_its_memory_to_blocks_where_the_host_has_room() -> None:
    async with moving_mesh(host={"num_blocks": 1000}) as scene:
        num_heads = scene.placement.num_kv_heads
        away = await scene.away(heads_of(0, 3, (0,)))
        assert away.num_blocks_after == 256 * num_heads // (num_heads - 1)


async def test_a_home_loses_blocks_by_a_move_only_where_the_order_says_how_many_are_enough() -> None:
    async with moving_mesh(host={"num_blocks": 250}) as scene:
        refused = await scene.move(whole_layers(0, 2))
        assert refused.phase is MigrationPhase.FAILED
        assert "256 are asked for" in refused.error
        assert scene.placement.epoch == 0
        away = await scene.away(whole_layers(0, 2), num_blocks=150)
        assert away.num_blocks_after == 150


async def test_how_far_a_move_is_is_told_while_it_copies() -> None:
    async with moving_mesh(move_bandwidth_mib=0.02) as scene:
        streams = await scene.begin(4, 100)
        started = await scene.start(heads_of(0, 3, (1,)))
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, MigrationPhase.COPYING)

        def is_part_way() -> bool:
            told = scene.placements.get(scene.home.incarnation)
            return any(0 < one.num_kv_bytes < one.num_total_bytes for one in told.moves) if told else False

        await scene.mesh.until(is_part_way)
        await scene.abandon(started.move_id)
        await scene.check(streams)


async def test_hosts_that_leave_at_once_give_back_one_module_after_the_other() -> None:
    async with moving_mesh() as scene:
        other = await scene.mesh.decode("decode-2", role="both", num_blocks=HOST_BLOCKS)
        await scene.mesh.until(lambda: other.presence in scene.home.service._roster.all())
        streams = await scene.begin(3, 200)
        await scene.away(whole_layers(0, 1))
        await scene.away(heads_of(1, 2, (0,)))
        await scene.away(whole_layers(2, 3), host=other.incarnation)
        scene.told.clear()
        async with asyncio.TaskGroup() as tasks:
            ended = [tasks.create_task(scene.mesh.stop(one)) for one in (scene.host, other)]
        assert [one.result() for one in ended] == [0, 0]
        assert not scene.placement.placed
        returns = sorted(scene.told.values(), key=lambda told: told[0].started_unix_seconds)
        assert [told[-1].phase for told in returns] == [MigrationPhase.DONE] * 3
        for before, after in itertools.pairwise(returns):
            assert before[-1].ended_unix_seconds <= after[0].started_unix_seconds
        await scene.check(streams)


@pytest.mark.parametrize(
    "phase",
    [
        MigrationPhase.PLANNED,
        MigrationPhase.RESERVING,
        MigrationPhase.COPYING,
        MigrationPhase.CATCHING_UP,
        MigrationPhase.SWITCHING,
    ],
)
@pytest.mark.parametrize("is_return", [False, True], ids=["away", "return"])
async def test_a_move_that_is_cancelled_leaves_everything_as_it_was_or_is_told_to_have_switched(
    phase: MigrationPhase, is_return: bool
) -> None:
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        if is_return:
            await scene.away(heads_of(0, 3, (0,)))
        streams = await scene.begin(4, 100)
        before = scene.placement
        started = await scene.start(
            None if is_return else heads_of(0, 3, (1,)), returned_move_id="move-1" if is_return else ""
        )
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, phase)
        answer = await scene.abandon(started.move_id)
        record = await scene.end(started.move_id)
        if record.phase is MigrationPhase.FAILED:
            assert isinstance(answer, MigrationAccepted)
            assert record.error == "it was cancelled"
            assert record.num_blocks_after == record.num_blocks_before
            assert scene.placement == before
        else:  # it was faster
            assert phase in (MigrationPhase.CATCHING_UP, MigrationPhase.SWITCHING)
            assert reason(answer) is DenialReason.INVALID
            assert scene.placement.epoch == before.epoch + 1
        await scene.check(streams)


async def test_a_move_that_is_cancelled_by_several_at_once_is_rolled_back_once() -> None:
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        streams = await scene.begin(4, 100)
        started = await scene.start(heads_of(0, 3, (1,)))
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, MigrationPhase.COPYING)

        async def abandon_after(num_turns: int) -> MigrationAccepted | MigrationDenied:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            return await scene.abandon(started.move_id)

        answers = await asyncio.gather(*(abandon_after(i) for i in range(24)))
        assert isinstance(answers[0], MigrationAccepted)
        assert {reason(a) for a in answers if isinstance(a, MigrationDenied)} <= {DenialReason.INVALID}
        assert (await scene.end(started.move_id)).error == "it was cancelled"
        await scene.check(streams)


async def test_only_what_was_begun_can_be_cancelled() -> None:
    async with moving_mesh() as scene:
        assert reason(await scene.abandon("never")) is DenialReason.NOT_FOUND
        done = await scene.away(whole_layers(0, 1))
        assert reason(await scene.abandon(done.move_id)) is DenialReason.INVALID


async def test_a_move_that_has_not_switched_by_its_deadline_is_rolled_back() -> None:
    async with moving_mesh(move_bandwidth_mib=0.02) as scene:
        streams = await scene.begin(4, 80)
        record = await scene.move(heads_of(0, 3, (1,)), deadline_seconds=0.3)
        assert record.phase is MigrationPhase.FAILED
        assert "deadline" in record.error
        assert record.num_blocks_after == record.num_blocks_before == 256
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_lent_blocks_come_and_go() -> None:
    async with moving_mesh(num_blocks=140) as scene:
        streams = await scene.begin(5, 120)
        away = await scene.away(remote_blocks(3), num_blocks=60)
        assert (away.num_blocks_before, away.num_blocks_after) == (140, 200)
        more = await scene.begin(5, 60)
        await scene.back(away.move_id)
        await scene.check([*streams, *more])
        await scene.until_nothing_is_left()


async def test_a_host_that_drains_gives_its_modules_back_first() -> None:
    async with moving_mesh(host={"num_blocks": 1000}) as scene:
        streams = await scene.begin(4, 200)
        await scene.away(whole_layers(0, 1))
        await scene.away(heads_of(1, 3, (1,)))
        stopping = asyncio.ensure_future(scene.mesh.stop(scene.host))
        await scene.mesh.until(lambda: not scene.placement.placed)
        assert await stopping == 0
        returns = [one[-1] for one in scene.told.values() if one[-1].is_return]
        assert [one.reason for one in returns] == ["its host is leaving"] * 2
        assert scene.home.gauge("kvmesh_hosts_lost_total") == 0
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_a_home_that_ends_leaves_nothing_at_its_host() -> None:
    async with moving_mesh() as scene:
        streams = await scene.begin(3, 40)
        await scene.away(whole_layers(0, 2))
        assert await scene.mesh.stop(scene.home) == 0
        await scene.check(streams)
        await scene.mesh.until(lambda: scene.host.gauge("kvmesh_hosted_modules") == 0)
        await scene.mesh.until(lambda: scene.host.gauge("kvmesh_hosted_bytes") == 0)


async def test_moves_go_on_while_the_broker_is_away() -> None:
    async with moving_mesh(move_bandwidth_mib=1) as scene:
        streams = await scene.begin(3, 100)
        started = await scene.start(heads_of(0, 3, (1,)))
        assert isinstance(started, MigrationAccepted)
        scene.home.bus.disconnect()
        await scene.mesh.until(lambda: len(scene.placement.placed) == 1)
        scene.home.bus.reconnect()
        await scene.end(started.move_id)
        await scene.mesh.until(lambda: len(scene.told_placement(scene.home).placed) == 1)
        await scene.check(streams)


async def test_a_move_is_one_trace_with_a_span_for_each_phase() -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_traces(service="test", name="test", incarnation="test", exporter=exporter)
    async with moving_mesh() as scene:
        away = await scene.away(heads_of(0, 3, (1,)))
        await scene.mesh.until(lambda: scene.home.gauge("kvmesh_migrations_total", outcome="done") == 1)
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    (move,) = (span for name, span in spans.items() if name == "move")
    phases = {name.removeprefix("move.") for name in spans if name.startswith("move.")}
    assert phases == {"reserving", "copying", "catching_up", "switching", "releasing"}
    assert dict(move.attributes or {})["move_id"] == away.move_id
    assert move.context is not None
    for phase in phases:
        parent = spans[f"move.{phase}"].parent
        assert parent is not None
        assert parent.span_id == move.context.span_id
