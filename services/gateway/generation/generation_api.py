"""The two generating endpoints: from a request's body to its sessions, and on to the answer."""

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import Span
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from libs.telemetry.traces import start_span, traceparent_of
from services.gateway.api.body import read_json
from services.gateway.api.errors import BadRequest
from services.gateway.api.gate import Gate
from services.gateway.api.tenants import NOBODY, SCOPE_KEY, Tenant, salt_of, session_of
from services.gateway.api.together import ClientGone
from services.gateway.generation.answer import Wording
from services.gateway.generation.answering import Answering, AnsweringRules
from services.gateway.generation.chat_answer import ChatWording
from services.gateway.generation.completion_answer import CompletionWording
from services.gateway.generation.dispatch import Dispatch
from services.gateway.generation.language import Language
from services.gateway.generation.model_card import ServedModel
from services.gateway.generation.parameters import (
    DEFAULT_COMPLETION_TOKENS,
    NUM_SEEDS,
    check_chat,
    check_completion,
    message_texts,
    num_choices,
    num_new_tokens,
    sampling_params,
    stop_strings,
)
from services.gateway.generation.prompt_names import prompt_names
from services.gateway.generation.request_fields import ChatRequest, CompletionRequest, GenerationFields
from services.gateway.generation.sequence_text import SequenceText
from services.gateway.generation.session import Session, Times
from services.gateway.metrics import GatewayMetrics

SESSION_HEADER = "x-session-id"
MAX_SEQUENCES = 256
"""Of one request: prompts times choices."""

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


@dataclass(frozen=True)
class GenerationRules:
    """Bounds of a generating request."""

    max_body_bytes: int
    request_timeout_seconds: float
    answering: AnsweringRules


@dataclass(frozen=True)
class _Asked:
    """A request as both endpoints understand it."""

    fields: GenerationFields
    prompts: list[list[int]]
    wanted_tokens: int | None
    default_tokens: int | None
    logprobs: int | None
    prompt_param: str
    continues: bool


@dataclass(frozen=True)
class _NamedPrompt:
    """A prompt, and under which salt and names its KV is known."""

    token_ids: list[int]
    salt: str
    names: bytes


@dataclass(frozen=True)
class _Arrival:
    """When and how a request came."""

    answer_id: str
    seconds: float
    unix_seconds: float
    span: Span
    tenant: Tenant
    session_header: str


Prepare = Callable[[Request, _Arrival], Awaitable[Answering]]


class GenerationApi:
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        dispatch: Dispatch,
        served: ServedModel,
        gate: Gate,
        metrics: GatewayMetrics,
        rules: GenerationRules,
    ) -> None:
        self._dispatch, self._served, self._gate = dispatch, served, gate
        self._metrics, self._rules = metrics, rules

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        return _Generating(request, self._gate, self._prepare_chat, "chatcmpl")

    async def completions(self, request: Request) -> Response:
        """The continuation of one or several prompts."""
        return _Generating(request, self._gate, self._prepare_completion, "cmpl")

    async def _prepare_chat(self, request: Request, arrival: _Arrival) -> Answering:
        asked = await read_json(request, _chat_decoder, max_bytes=self._rules.max_body_bytes)
        language = self._served.language_of(asked.model)
        check_chat(asked)
        prompt = await language.encode_chat(
            message_texts(asked.messages), add_generation_prompt=asked.add_generation_prompt is not False
        )
        if not prompt:
            raise BadRequest("the messages make an empty prompt", param="messages")
        wording = ChatWording(
            language.tokenizer,
            answer_id=arrival.answer_id,
            created=int(arrival.unix_seconds),
            model=asked.model,
            with_logprobs=bool(asked.logprobs),
            with_usage=_with_usage(asked),
        )
        meaning = _Asked(
            fields=asked,
            prompts=[prompt],
            wanted_tokens=asked.max_completion_tokens or asked.max_tokens,
            default_tokens=None,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            prompt_param="messages",
            continues=False,
        )
        return await self._answering(meaning, wording, language, arrival)

    async def _prepare_completion(self, request: Request, arrival: _Arrival) -> Answering:
        asked = await read_json(request, _completion_decoder, max_bytes=self._rules.max_body_bytes)
        language = self._served.language_of(asked.model)
        check_completion(asked)
        prompts = await language.encode_prompts(
            asked.prompt, add_special_tokens=asked.add_special_tokens is not False
        )
        wording = CompletionWording(
            language.tokenizer,
            answer_id=arrival.answer_id,
            created=int(arrival.unix_seconds),
            model=asked.model,
            num_top_logprobs=asked.logprobs,
            with_usage=_with_usage(asked),
            echoes=await _echoes(asked, prompts, language),
        )
        meaning = _Asked(
            fields=asked,
            prompts=prompts,
            wanted_tokens=asked.max_tokens,
            default_tokens=DEFAULT_COMPLETION_TOKENS,
            logprobs=asked.logprobs,
            prompt_param="prompt",
            continues=True,
        )
        return await self._answering(meaning, wording, language, arrival)

    async def _answering(
        self, asked: _Asked, wording: Wording, language: Language, arrival: _Arrival
    ) -> Answering:
        fields = asked.fields
        num_each = num_choices(fields)
        if len(asked.prompts) * num_each > MAX_SEQUENCES:
            raise BadRequest(
                f"{len(asked.prompts)} prompts times {num_each} choices exceed {MAX_SEQUENCES} sequences",
                param="n",
            )
        answering = Answering(
            wording,
            self._dispatch,
            self._metrics,
            self._rules.answering,
            answer_id=arrival.answer_id,
            num_choices=num_each,
            is_stream=bool(fields.stream),
            with_usage=_with_usage(fields),
        )
        seed = secrets.randbelow(NUM_SEEDS) if fields.seed is None else fields.seed
        for prompt in asked.prompts:
            named = await self._named(prompt, fields, arrival)
            for number in range(num_each):
                session = self._session(asked, named, seed + number, language, arrival, answering)
                answering.sessions.append(session)
        return answering

    async def _named(self, prompt: list[int], fields: GenerationFields, arrival: _Arrival) -> _NamedPrompt:
        salt = salt_of(arrival.tenant, fields.cache_salt or "")
        fits = len(prompt) < self._served.max_model_len()
        layout = self._served.layout() if fits else None  # what does not fit is refused, so not named
        return _NamedPrompt(prompt, salt, await prompt_names(layout, prompt, salt))

    def _session(
        self,
        asked: _Asked,
        named: _NamedPrompt,
        seed: int,
        language: Language,
        arrival: _Arrival,
        answering: Answering,
    ) -> Session:
        max_tokens = num_new_tokens(
            asked.wanted_tokens,
            asked.default_tokens,
            num_prompt_tokens=len(named.token_ids),
            max_model_len=self._served.max_model_len(),
            param=asked.prompt_param,
        )
        sampling = sampling_params(
            asked.fields,
            wanted_tokens=asked.wanted_tokens,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=asked.logprobs,
            vocab_size=language.vocab_size,
        )
        text = SequenceText(
            language.detokenizer(continues=asked.continues),
            stops=stop_strings(asked.fields),
            min_tokens=sampling.min_tokens,
            keeps_tokens=asked.logprobs is not None,
        )
        choice = len(answering.sessions)
        return Session(
            name=f"{arrival.answer_id}-{choice}",
            choice=choice,
            prompt=named.token_ids,
            sampling=sampling,
            text=text,
            deliver=answering.deliver,
            deadline_unix_seconds=arrival.unix_seconds + self._rules.request_timeout_seconds,
            times=Times(arrived=arrival.seconds),
            model=self._served.place_model(),
            cache_salt=named.salt,
            tenant=arrival.tenant.name,
            names=named.names,
            conversation=session_of(arrival.tenant, _conversation(asked.fields, arrival)),
            traceparent=traceparent_of(arrival.span),
        )


class _Generating(Response):
    """Answers by its own means, from the reading of the body on, while it counts as a request in progress."""

    def __init__(self, request: Request, gate: Gate, prepare: Prepare, prefix: str) -> None:
        self._request, self._gate, self._prepare, self._prefix = request, gate, prepare, prefix
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer_id = f"{self._prefix}-{secrets.token_hex(12)}"
        traceparent = self._request.headers.get("traceparent", "")
        with self._gate, start_span("gateway.request", traceparent, request_id=answer_id) as span:
            arrival = _Arrival(
                answer_id,
                time.monotonic(),
                time.time(),
                span,
                tenant=scope.get(SCOPE_KEY, NOBODY),
                session_header=self._request.headers.get(SESSION_HEADER, ""),
            )
            if arrival.tenant.name:
                span.set_attribute("tenant", arrival.tenant.name)
            try:
                answering = await self._prepare(self._request, arrival)
                await answering.run(receive, send)
            except (ClientDisconnect, ClientGone):
                span.set_attribute("client_gone", True)


async def _echoes(asked: CompletionRequest, prompts: list[list[int]], language: Language) -> tuple[str, ...]:
    """The prompts' texts by choice, where the request wants them in front of the answers."""
    if not asked.echo:
        return ()
    texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    echoes: list[str] = []
    for number, prompt in enumerate(prompts):
        text = texts[number] if number < len(texts) else None
        echo = text if isinstance(text, str) else await language.decode(prompt)
        echoes += [echo] * num_choices(asked)
    return tuple(echoes)


def _conversation(fields: GenerationFields, arrival: _Arrival) -> str:
    return arrival.session_header or fields.session_id or fields.prompt_cache_key or ""


def _with_usage(fields: GenerationFields) -> bool:
    return bool(fields.stream and fields.stream_options and fields.stream_options.include_usage)
