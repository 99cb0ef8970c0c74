"""Calls that nobody answers wait where too much is unsent, by the wait that lets hosted work go on."""

import numpy as np
import torch

from libs.engine.forward.remote_kv import Hosts
from libs.engine.hosting.calls import HostedCall, MoveBlocks, Settle
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.meter import Meter

NOTHING_MOVED = MoveBlocks(np.empty((2, 0), dtype=np.int64))


class Full:
    """A host with no room: no call is done."""

    worker = "host"

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def call(self, call: HostedCall) -> Answer:
        self.answers.append(Answer(lambda: None))
        return self.answers[-1]


def test_a_call_without_an_answer_waits_for_room_as_for_any_answer() -> None:
    waited: list[Answer] = []

    def wait(worker: str, answer: Answer) -> torch.Tensor:
        waited.append(answer)
        answer.give(torch.empty(0))
        return answer.result()

    hosts, host = Hosts(wait, Meter()), Full()
    hosts.add(host)
    assert hosts.call("host", NOTHING_MOVED).is_done
    assert waited == host.answers
    assert not hosts.call("host", Settle()).is_done
    assert len(waited) == 1


def test_a_host_lost_while_room_is_waited_for_is_told_by_the_next_answer() -> None:
    def wait(worker: str, answer: Answer) -> torch.Tensor:
        answer.fail(HostLost(worker, "gone"))
        return answer.result()

    hosts = Hosts(wait, Meter())
    hosts.add(Full())
    assert hosts.call("host", NOTHING_MOVED).is_done
