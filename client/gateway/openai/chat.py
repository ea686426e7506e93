"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

from allspan.client.gateway.admission.admission import Job, jobs_per_choice
from allspan.client.gateway.chat.reader import Reading
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.openai.chat_request import ChatRequest, read_chat
from allspan.client.gateway.openai.chat_shape import ChatShape
from allspan.client.gateway.openai.schemas import parse
from allspan.client.gateway.openai.shapes import Plan, TokenTexts


async def plan_chat(context: GatewayContext, body: bytes) -> Plan:
    """Checks everything; nothing runs yet."""
    request = parse(ChatRequest, body, context.config.limits)
    context.model.check_name(request.model)
    job, reading = await chat_job(context, request)
    shape = ChatShape(
        TokenTexts(context.tokenizer, bool(request.return_tokens_as_token_ids)),
        reading,
        job.token_ids,
        with_logprobs=job.params.logprobs is not None,
        with_prompt_logprobs=job.params.prompt_logprobs is not None,
        with_token_ids=bool(request.return_token_ids),
    )
    return Plan(
        jobs_per_choice(job, request.choices),
        shape,
        request.choices,
        bool(request.stream),
        request.include_usage,
        continuous_usage=request.continuous_usage,
    )


async def chat_job(
    context: GatewayContext, request: ChatRequest, most_tokens: int | None = None
) -> tuple[Job, Reading]:
    """Returns the engine's job for a conversation, and the reader of its output. InvalidRequest names what does not
    fit.

    `most_tokens`: the length of the output where the request sets none, or what the context has left if that is less.
    """
    setup = context.prompts.chat
    fields = context.sampling.fields(request.sampling())
    chat = read_chat(request, setup, fields.get("grammar"))
    if chat.grammar is not None:
        fields["grammar"] = chat.grammar
    how = chat.rendering
    options = context.model.with_adapter(request.options(), request.model)
    token_ids = await context.prompts.encode_chat(chat.messages, request.prompt_options(), how)
    params = context.sampling.params(fields, len(token_ids), default_max_tokens=most_tokens)
    reading = chat.reading(setup, token_ids)
    job = Job(
        token_ids,
        params,
        continues=how.continues,
        options=options,
        text=request.text_options(),
        tokenizer=setup.tokenizer_for(reading),
        grammar_field=chat.grammar_field,
    )
    return job, reading


async def count_chat(context: GatewayContext, request: ChatRequest) -> int:
    """Returns the number of prompt tokens of a conversation, however long it is. InvalidRequest as for its answer."""
    context.sampling.params(context.sampling.fields(request.sampling()), 0, None)
    chat = read_chat(request, context.prompts.chat)
    options = replace(request.prompt_options(), only_counted=True)
    how = chat.rendering
    return len(await context.prompts.encode_chat(chat.messages, options, how))
