"""A host is lost with weights that its home cannot read again: the home ends, and its sequences go on."""

import asyncio
from typing import Any

import pytest
from moves_scene import MovesScene
from workers_mesh import running_mesh
from workers_reference import tiny_model

from libs.model.model import Model
from libs.placement.module import whole_layers
from libs.request.outcome import FailureReason
from libs.runtime.life import EXIT_CRASHED
from libs.runtime.runtime import Runtime


async def made_in_memory(settings: Any, runtime: Runtime) -> Model:
    model = tiny_model()
    return Model(model.config, model.weights, fingerprint=model.fingerprint)


async def test_a_worker_whose_weights_are_lost_ends_and_says_that_it_is_to_be_restarted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with running_mesh() as mesh:
        mesh.open_model = made_in_memory  # type: ignore[method-assign]  # no files to read layers from
        gateway = await mesh.gateway()
        home, host = await mesh.decode("decode-0", role="both"), await mesh.decode("decode-1", role="both")
        scene = MovesScene(mesh, gateway, home, host)
        await scene.open()
        await mesh.until(lambda: host.presence in home.service._roster.all())
        await scene.away(whole_layers(1, 2), with_weights=True)
        streams = await scene.begin(3, 400)
        for stream in streams:
            await stream.until(2)
        await mesh.kill(host)
        assert home.task is not None
        async with asyncio.timeout(20):
            assert await home.task == EXIT_CRASHED
        assert {stream.failure for stream in streams} <= {FailureReason.PEER_LOST, None}
        assert all(len(stream.tokens) < 400 for stream in streams)
        told = capsys.readouterr().out
        assert "the weights of layers [1] were at the host" in told
        assert "restart this worker" in told
        await scene.bus.close()
