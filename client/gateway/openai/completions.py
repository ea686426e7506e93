"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from allspan.client.gateway.admission.admission import Job, jobs_per_choice
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.openai.completion_shape import CompletionShape, Shown
from allspan.client.gateway.openai.schemas import CompletionRequest, Prompt, parse, read_prompts
from allspan.client.gateway.openai.shapes import Plan

DEFAULT_MAX_TOKENS = 16


async def plan_completion(context: GatewayContext, body: bytes) -> Plan:
    """Checks everything; nothing runs yet."""
    request = parse(CompletionRequest, body, context.config.limits)
    context.model.check_name(request.model)
    return await completion_plan(context, request, DEFAULT_MAX_TOKENS)


async def completion_plan(context: GatewayContext, request: CompletionRequest, most_tokens: int | None) -> Plan:
    """Returns the plan of a checked request. `most_tokens`: the length of the output where the request sets none (or
    what the context has left if that is less); None: the rest of the context."""
    prompts = read_prompts(request.prompt, context.config.limits.max_prompts)
    fields = context.sampling.fields(_sampling(request))
    options, reading = context.model.with_adapter(request.options(), request.model), request.prompt_options()
    text = replace(request.text_options(), only_prompt=_only_prompt(request))
    jobs: list[Job] = []
    echoes: list[str] = []
    for i, prompt in enumerate(prompts):
        token_ids = await context.prompts.encode(prompt, "prompt" if len(prompts) == 1 else f"prompt[{i}]", reading)
        params = context.sampling.params(fields, len(token_ids), most_tokens)
        job = Job(token_ids, params, options=options, text=text, grammar_field=request.grammar_field)
        jobs += jobs_per_choice(job, request.candidates)
        if request.echo:
            echoes.append(_echo(context, request, prompt, token_ids))
    shown = Shown(
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        skip_special_tokens=text.skip_special_tokens,
    )
    prompt_ids = [job.token_ids for job in jobs[:: request.candidates]]
    shape = CompletionShape(context.tokenizer, shown, prompt_ids, request.choices, echoes)
    candidates = request.candidates if request.candidates > request.choices else 0
    usage = {"include_usage": request.include_usage, "continuous_usage": request.continuous_usage}
    return Plan(jobs, shape, request.choices, bool(request.stream), candidates=candidates, **usage)


def _only_prompt(request: CompletionRequest) -> bool:
    """The engine generates a token at least; with `echo` its caller may want none."""
    return bool(request.echo) and request.max_tokens == 0


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    """Fields of `SamplingParams`, with what `echo` and `best_of` need beside what is asked for."""
    fields = request.sampling()
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
        if request.echo:
            fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    elif request.candidates > request.choices:
        fields["logprobs"] = 0
    if _only_prompt(request):
        fields |= {"max_tokens": 1, "min_tokens": 0}
    return fields


def _echo(context: GatewayContext, request: CompletionRequest, prompt: Prompt, token_ids: Sequence[int]) -> str:
    """A text as it was given, unless only its end was read."""
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    return context.tokenizer.decode(token_ids, request.skip_special_tokens is not False)
