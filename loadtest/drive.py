"""Open loop: every conversation begins at its time, however many are still under way."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loadtest.client import Client
from loadtest.conversation import Arrival, Conversation
from loadtest.record import Record

Clock = Callable[[], float]


class Drive:
    """One run. The counts may be read while it goes on."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        *,
        api: str,
        max_in_flight: int,
        api_keys: Sequence[str] = (),
    ) -> None:
        self._client, self._clock, self._api = client, clock, api
        self._api_keys = api_keys or ("",)
        self._seats = asyncio.Semaphore(max_in_flight)
        self.records: list[Record] = []
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.num_done = 0
        self.num_tokens = 0
        self.errors: Counter[str] = Counter()

    async def run(self, arrivals: Iterable[Arrival]) -> None:
        """Until all answers are there. Cancelling it cuts what is open; the records stay."""
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, arrival.at_seconds - self._clock()))
                key = self._api_keys[number % len(self._api_keys)]
                group.create_task(self._converse(arrival, key))

    @property
    def num_waiting(self) -> int:
        """Requests that are due and find no room here."""
        return len(self.records) - self.num_done - self.num_in_flight

    async def _converse(self, arrival: Arrival, api_key: str) -> None:
        conversation = arrival.conversation
        due_seconds, history = arrival.at_seconds, _History(self._api)
        for number, turn in enumerate(conversation.turns):
            record = Record(conversation.name, number, due_seconds)
            self.records.append(record)
            asked = history.ask(turn.prompt) | {"max_tokens": turn.max_tokens}
            answer = await self._ask(asked, record, conversation, api_key)
            if record.error:
                return
            history.heard(answer)
            if number + 1 < len(conversation.turns):
                due_seconds = self._clock() + conversation.think_seconds
                await asyncio.sleep(conversation.think_seconds)

    async def _ask(
        self, asked: dict[str, Any], record: Record, conversation: Conversation, api_key: str
    ) -> str:
        session = conversation.name if len(conversation.turns) > 1 else ""
        async with self._seats:
            self.num_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            try:
                return await self._client.ask(asked, record, api_key=api_key, session=session)
            finally:
                self.num_in_flight -= 1
                self.num_done += 1
                self.num_tokens += record.num_output_tokens
                if record.error:
                    self.errors[record.error] += 1


class _History:
    """A conversation so far, as the next request has to carry it."""

    def __init__(self, api: str) -> None:
        self._api = api
        self._messages: list[dict[str, str]] = []
        self._text = ""

    def ask(self, prompt: str | tuple[int, ...]) -> dict[str, Any]:
        if not isinstance(prompt, str):
            return {"prompt": list(prompt)}
        if self._api == "chat":
            self._messages.append({"role": "user", "content": prompt})
            return {"messages": list(self._messages)}
        self._text += prompt
        return {"prompt": self._text}

    def heard(self, answer: str) -> None:
        if self._api == "chat":
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._text += answer
