"""`allspan plan MODEL`: what a cluster would look like, without loading anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from allspan.launch.console import size
from allspan.launch.hosts.checks.link_cost import LinkConfig, LinkCost, link_cost
from allspan.launch.hosts.messages import Facts
from allspan.launch.hosts.start import laid_out
from allspan.launch.models.checkpoint_files import check_files, check_stages, check_tokenizer
from allspan.launch.models.conversion import with_its_ranks
from allspan.launch.models.draft_model import with_its_path
from allspan.launch.models.find_model import FoundModel, resolve_model
from allspan.launch.placement.estimate import DecodeStep, advice, decode_step, formula
from allspan.launch.placement.gpus import VISIBLE
from allspan.launch.placement.placement import Placement
from allspan.launch.settings import ServeSettings, add_flags, serve_parser, serve_settings
from allspan.protos.api.errors import DeadlineExceeded, InternalError, from_code
from allspan.protos.api.wording import counted
from allspan.protos.config.adapters import checked_adapters, parse_modules
from allspan.protos.config.flags import Parser, build
from allspan.protos.config.installed import require_ranks
from allspan.protos.config.settings import ServiceConfig, WorkerConfig

TIMEOUT_S = 120


def make_parser() -> Parser:
    parser = serve_parser()
    parser.prog, parser.description = (
        "allspan plan",
        "Prints the ranks, threads, memory and context of a start, without loading the model.",
    )
    parser.add_argument("--json", action="store_true", help="Prints one JSON object.")
    add_flags(parser.group("link", "what is assumed of the link between hosts"), LinkConfig)
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    require_ranks()
    settings = with_its_ranks(serve_settings(namespace))
    settings = replace(settings, adapters=checked_adapters(settings.adapters, settings.served_model_name))
    model = resolve_model(settings.model, settings.hub)
    parse_modules(settings.adapters, (model.name,))
    check_stages(model.path, settings.placement.stages)
    with laid_out(settings.hosts, settings.placement, settings.weights.device) as (bound, fleet):
        placement, facts = bound.placement, fleet.facts if fleet else {}
    has_weights = settings.weights.load_format != "dummy"
    check_files(model.path, has_weights)
    settings = replace(settings, scheduler=with_its_path(settings.scheduler, settings.hub, has_weights))
    check_tokenizer(model.path)
    plan = plan_memory(settings, placement, model, facts)
    plan |= {"model_name": model.name, "model_path": str(model.path), "threads": [p.threads for p in placement.ranks]}
    plan |= {"nodes": [p.node for p in placement.ranks], "placement": placement.describe()}
    plan |= {"replicas": placement.replicas, "cpus": [p.cpus for p in placement.ranks], "memory": bound.memory}
    plan |= {"gpus": [asdict(p.gpu) for p in placement.ranks if p.gpu is not None]}
    plan |= {"hosts": [p.host for p in placement.ranks], "host_memory": {name: f.memory for name, f in facts.items()}}
    cost = link_cost(plan, build(LinkConfig, namespace))
    plan |= {"link": asdict(cost) | {"tensor_pays": cost.tensor_pays} if cost else None}
    step = decode_step(plan)
    plan |= {"decode_step": asdict(step), "floor_tokens_per_s": step.floor_tokens_per_s, "advice": advice(plan)}
    print(json.dumps(plan) if namespace.json else table(plan, cost))
    return 1 if plan["refusal"] else 0


def plan_memory(
    settings: ServeSettings, placement: Placement, model: FoundModel, facts: Mapping[str, Facts]
) -> dict[str, Any]:
    """Plans the memory of one replica, beside the others. Asks the worker's planner, which needs torch and so is a
    process of its own.

    Raises what loading would, and DeadlineExceeded.
    """
    first = placement.ranks[0]
    config = WorkerConfig(
        model=replace(settings.weights, path=str(model.path), name=model.name),
        service=ServiceConfig(run_dir=tempfile.gettempdir()),
        cache=settings.cache,
        scheduler=settings.scheduler,
        parallel=replace(settings.parallel, threads=first.threads, cpus=first.cpus),
        adapters=settings.adapters,
    )
    sharing = Counter((p.host, p.node) for p in placement.ranks)
    on_node = 1 if first.gpu else max(sharing.values())
    available = None
    if facts and not first.gpu:
        available, on_node = min(
            ((_available(facts[host], node), count) for (host, node), count in sharing.items()),
            key=lambda each: each[0] / each[1],
        )
    with tempfile.TemporaryDirectory(prefix="allspan-plan-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(asdict(config)), encoding="utf-8")
        ranks = len(placement.ranks) // placement.replicas
        words = [sys.executable, "-m", "allspan.worker.tools.memory_plan", str(path), "--ranks", str(ranks)]
        words += ["--ranks-on-node", str(on_node)]
        words += [] if available is None else ["--available", str(available)]
        try:
            seen = {VISIBLE: first.gpu.visible} if first.gpu else {}
            run = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | seen)
        except subprocess.TimeoutExpired as error:
            raise DeadlineExceeded(f"planning {model.name} took more than {TIMEOUT_S} s") from error
    try:
        plan: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line for line in run.stderr.splitlines() if line.strip()] or ["nothing"]
        raise InternalError(f"the planner ended with code {run.returncode}; it said last: {lines[-1]}") from None
    if "error" in plan:
        raise from_code(plan["error"], plan["message"])
    return plan


def _available(facts: Facts, node: int | None) -> int:
    """Returns the bytes that ranks on a node of a host may take; without a node, on the host."""
    nodes = {each["index"]: int(each["memory_available"]) for each in facts.topology["nodes"]}
    return min(facts.memory, nodes.get(node, 0) or facts.memory) if node is not None else facts.memory


def table(plan: dict[str, Any], cost: LinkCost | None = None) -> str:
    several = plan["replicas"] > 1
    column = f"  {'replica':>7}" if several else ""
    quantization = plan["quantization"]
    lines = [
        f"{plan['model_name']} ({plan['model_path']})",
        f"  {plan['placement']}; weights as {plan['dtype'] if quantization == 'none' else quantization}",
        "",
        f"{column}  {'rank':>4}  {'node':>4}  {'threads':>7}  {'weights':>12}  {'a token':>12}"
        f"  {'KV cache':>12}  {'host tier':>12}  {'sum':>12}  processors",
    ]
    for index, (node, threads) in enumerate(zip(plan["nodes"], plan["threads"], strict=True)):
        replica, place = divmod(index, len(plan["ranks"]))
        rank = plan["ranks"][place]
        weights, cache, tier = rank["weight_bytes"], rank["kv_bytes"], rank["host_kv_bytes"]
        column = f"  {replica:>7}" if several else ""
        where = "-" if node is None else node
        lines.append(
            f"{column}  {rank['rank']:>4}  {where:>4}  {threads:>7}"
            f"  {size(weights):>12}  {size(rank['token_bytes']):>12}"
            f"  {size(cache):>12}  {size(tier):>12}  {size(weights + cache + tier):>12}"
            f"  {ranges(plan['cpus'][index]) or 'not pinned'}{_layers(rank) if plan['stages'] > 1 else ''}"
        )
    gpus = [f"{gpu['index']} ({gpu['name']})" for gpu in plan["gpus"]]
    lines += [
        "",
        f"  memory of the nodes        {plan['memory']}",
        *([f"  GPUs of the ranks          {', '.join(gpus)}"] if gpus else []),
        f"  memory available           {size(plan['available_bytes'])}{' on a GPU' if gpus else ''}",
        *([f"  buffers of a rank's steps  {size(plan['ranks'][0]['step_bytes'])}"] if gpus else []),
        f"  KV cache of a token        {_token_kv(plan)}",
        f"  KV cache size              {plan['num_tokens']:,} tokens ({_pages(plan)})",
        f"  host tier                  {plan['host_pages'] * plan['page_size'] * plan['attention_ranks']:,} tokens "
        f"({counted(plan['host_pages'], 'page')})",
        f"  context of a request       {plan['max_model_len']:,} tokens",
        f"  largest context that fits  {plan['largest_model_len']:,} tokens",
        f"  parameters                 {plan['parameters']:,}{_active(plan)}",
        f"  a decode step, estimated   {formula(DecodeStep(**plan['decode_step']))}",
        f"  one request, by bytes      at most {plan['floor_tokens_per_s']:,.1f} tokens/s, if reading were all",
    ]
    lines += _hosts(plan, cost)
    lines += [f"  warning: {words}" for words in plan["advice"]]
    if plan["refusal"]:
        lines += ["", f"  does not fit: {plan['refusal']}"]
    return "\n".join(lines)


def _hosts(plan: dict[str, Any], cost: LinkCost | None) -> list[str]:
    """Returns a line for each host of a plan over hosts, and those of the link's cost."""
    lines = []
    for name, available in plan["host_memory"].items():
        mine = [rank for rank, host in zip(plan["ranks"], plan["hosts"], strict=True) if host == name]
        takes = sum(rank["weight_bytes"] + rank["kv_bytes"] + rank["host_kv_bytes"] for rank in mine)
        ranks = ", ".join(str(plan["ranks"].index(rank)) for rank in mine)
        lines.append(f"  {f'host {name}':<25}  ranks {ranks}: {size(takes)} of {size(available)} available")
    return [*lines, *(f"  over the link: {words}" for words in cost.lines())] if cost else lines


def _pages(plan: dict[str, Any]) -> str:
    pages, ranks = counted(plan["num_pages"], "page"), plan["attention_ranks"]
    return f"{pages} on each of {ranks} ranks" if ranks > 1 else pages


def _token_kv(plan: dict[str, Any]) -> str:
    """Returns what a token's KV takes, and what data-parallel attention frees of it."""
    own, every, freed = (size(plan["token_kv"][name]) for name in ("rank", "every_rank", "freed"))
    if plan["attention_ranks"] > 1:
        return f"{own}, on the rank that attends for it alone: {freed} fewer than all ranks would hold"
    words = f"{own} on a rank" + (f", {every} on all together" if len(plan["ranks"]) > 1 else "")
    return words + (f"; --data-parallel-attention would free {freed}" if plan["token_kv"]["freed"] else "")


def _active(plan: dict[str, Any]) -> str:
    """Returns what `parameters` is followed by for a mixture of experts."""
    active = plan["active_parameters"]
    return f", of which a token uses {active:,}" if active < plan["parameters"] else ""


def _layers(rank: dict[str, Any]) -> str:
    first, end = rank["layers"]
    return f"; layers {first} to {end - 1}"


def ranges(cpus: Sequence[int]) -> str:
    """`0-3,8`: the kernel's list format, in the order given."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)
