"""From the body of a generating request to its sequences."""

import secrets
import time

import msgspec
from starlette.requests import Request

from libs.request.sampling import SamplingParams
from services.gateway.api.auth import ANONYMOUS, SCOPE_KEY, Tenant, salt_of, session_of
from services.gateway.api.body import read_json
from services.gateway.api.errors import BadRequest
from services.gateway.generation.block_hashes import prompt_hashes
from services.gateway.generation.chat_format import ChatFormat
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.fields import ChatRequest, CompletionRequest
from services.gateway.generation.model import ServedModel, TextCodec
from services.gateway.generation.parameters import (
    DEFAULT_COMPLETION_TOKENS,
    NUM_SEEDS,
    check_chat,
    check_completion,
    message_texts,
    num_choices,
    num_logprobs,
    num_new_tokens,
    requested_tokens,
    sampling_params,
    stop_strings,
)
from services.gateway.generation.response import ResponseFormat
from services.gateway.generation.sequence import GenerationRequest, Sequence
from services.gateway.generation.text import SequenceText
from services.gateway.metrics import Times

SESSION_HEADER = "x-session-id"
MAX_SEQUENCES = 256
"""Of one request: prompts times choices."""

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


class RequestReader:
    """Reads, checks and tokenises generating requests."""

    def __init__(self, served: ServedModel, *, max_body_bytes: int, request_timeout_seconds: float) -> None:
        self._served = served
        self._max_body_bytes, self._timeout_seconds = max_body_bytes, request_timeout_seconds

    async def chat(self, http: Request, answer_id: str, traceparent: str) -> list[Sequence]:
        """The sequences of a chat request, one GenerationRequest's. Raises ApiError, ClientDisconnect."""
        arrived, arrived_unix = time.monotonic(), time.time()
        fields = await read_json(http, _chat_decoder, max_bytes=self._max_body_bytes)
        codec = self._served.codec_of(fields.model)
        check_chat(fields)
        prompt = await codec.encode_chat(
            message_texts(fields.messages), add_generation_prompt=fields.add_generation_prompt is not False
        )
        if not prompt:
            raise BadRequest("the messages make an empty prompt", param="messages")
        form = ChatFormat(
            codec.tokenizer,
            answer_id=answer_id,
            created=int(arrived_unix),
            model=fields.model,
            with_logprobs=bool(fields.logprobs),
            with_usage=_with_usage(fields),
        )
        request = self._request(http, fields, form, answer_id, traceparent, (arrived, arrived_unix))
        return await self._sequences(request, fields, codec, [prompt])

    async def completion(self, http: Request, answer_id: str, traceparent: str) -> list[Sequence]:
        """As `chat`, of a completion request: a sequence for each choice of each prompt."""
        arrived, arrived_unix = time.monotonic(), time.time()
        fields = await read_json(http, _completion_decoder, max_bytes=self._max_body_bytes)
        codec = self._served.codec_of(fields.model)
        check_completion(fields)
        prompts = await codec.encode_prompts(
            fields.prompt, add_special_tokens=fields.add_special_tokens is not False
        )
        form = CompletionFormat(
            codec.tokenizer,
            answer_id=answer_id,
            created=int(arrived_unix),
            model=fields.model,
            num_top_logprobs=fields.logprobs,
            with_usage=_with_usage(fields),
            echoes=await _echoes(fields, prompts, codec),
        )
        request = self._request(http, fields, form, answer_id, traceparent, (arrived, arrived_unix))
        return await self._sequences(request, fields, codec, prompts)

    def _request(
        self,
        http: Request,
        fields: ChatRequest | CompletionRequest,
        form: ResponseFormat,
        answer_id: str,
        traceparent: str,
        arrived: tuple[float, float],
    ) -> GenerationRequest:
        tenant: Tenant = http.scope.get(SCOPE_KEY, ANONYMOUS)
        session = http.headers.get(SESSION_HEADER, "") or fields.session_id or fields.prompt_cache_key or ""
        return GenerationRequest(
            answer_id=answer_id,
            arrived_seconds=arrived[0],
            deadline_unix_seconds=arrived[1] + self._timeout_seconds,
            format=form,
            num_choices=num_choices(fields),
            is_stream=bool(fields.stream),
            with_usage=_with_usage(fields),
            model=self._served.place_model(),
            tenant=tenant.name,
            cache_salt=salt_of(tenant, fields.cache_salt or ""),
            conversation=session_of(tenant, session),
            traceparent=traceparent,
        )

    async def _sequences(
        self,
        request: GenerationRequest,
        fields: ChatRequest | CompletionRequest,
        codec: TextCodec,
        prompts: list[list[int]],
    ) -> list[Sequence]:
        if len(prompts) * request.num_choices > MAX_SEQUENCES:
            raise BadRequest(
                f"{len(prompts)} prompts times {request.num_choices} choices exceed {MAX_SEQUENCES} "
                "sequences",
                param="n",
            )
        seed = secrets.randbelow(NUM_SEEDS) if fields.seed is None else fields.seed
        sequences: list[Sequence] = []
        for prompt in prompts:
            hashes = await self._hashes(prompt, request.cache_salt)
            for number in range(request.num_choices):
                sampling = self._sampling(fields, codec, len(prompt), seed + number)
                text = SequenceText(
                    codec.detokenizer(continues=isinstance(fields, CompletionRequest)),
                    stops=stop_strings(fields),
                    min_tokens=sampling.min_tokens,
                    keeps_tokens=sampling.logprobs is not None,
                )
                times = Times(request.arrived_seconds)
                sequences.append(Sequence(request, len(sequences), prompt, sampling, text, times, hashes))
        return sequences

    async def _hashes(self, prompt: list[int], cache_salt: str) -> bytes:
        fits = len(prompt) < self._served.max_model_len()
        layout = self._served.layout() if fits else None  # what does not fit is refused, so not hashed
        return await prompt_hashes(layout, prompt, cache_salt)

    def _sampling(
        self, fields: ChatRequest | CompletionRequest, codec: TextCodec, num_prompt_tokens: int, seed: int
    ) -> SamplingParams:
        is_chat = isinstance(fields, ChatRequest)
        requested = requested_tokens(fields)
        max_tokens = num_new_tokens(
            requested,
            None if is_chat else DEFAULT_COMPLETION_TOKENS,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=self._served.max_model_len(),
            param="messages" if is_chat else "prompt",
        )
        return sampling_params(
            fields,
            requested_tokens=requested,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=num_logprobs(fields),
            vocab_size=codec.vocab_size,
        )


async def _echoes(fields: CompletionRequest, prompts: list[list[int]], codec: TextCodec) -> tuple[str, ...]:
    """The prompts' texts by choice, where the request wants them in front of the answers."""
    if not fields.echo:
        return ()
    texts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
    echoes: list[str] = []
    for number, prompt in enumerate(prompts):
        text = texts[number] if number < len(texts) else None
        echo = text if isinstance(text, str) else await codec.decode(prompt)
        echoes += [echo] * num_choices(fields)
    return tuple(echoes)


def _with_usage(fields: ChatRequest | CompletionRequest) -> bool:
    return bool(fields.stream and fields.stream_options and fields.stream_options.include_usage)
