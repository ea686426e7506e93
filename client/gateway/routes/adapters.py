"""vLLM's endpoints that load and unload LoRA adapters, and SGLang's: for the admin key alone."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from allspan.client.gateway.adapters import AdapterOperator
from allspan.client.gateway.context import GatewayContext
from allspan.client.gateway.http.body import read_json_body
from allspan.client.gateway.http.endpoint import Access, Endpoint
from allspan.client.gateway.openai.schemas import RequestBody, parse


class LoadAdapterRequest(RequestBody):
    """The adapter's name for requests, and its folder: whole, or from --lora-dir on. `base_model_name` is what
    /v1/models tells as its parent, in the place of the model."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class UnloadAdapterRequest(RequestBody):
    """The name of an adapter that is loaded."""

    lora_name: str


def endpoints(context: GatewayContext) -> list[Endpoint]:
    """Returns the endpoints of adapters."""
    operator, limits = AdapterOperator(context), context.config.limits

    async def load(request: Request) -> str:
        asked = parse(LoadAdapterRequest, await read_json_body(request, limits), limits)
        await operator.load(asked.lora_name, asked.lora_path, asked.base_model_name or "")
        return f"LoRA adapter '{asked.lora_name}' added successfully."

    async def unload(request: Request) -> str:
        asked = parse(UnloadAdapterRequest, await read_json_body(request, limits), limits)
        left = await operator.unload(asked.lora_name)
        told = f"LoRA adapter '{asked.lora_name}' removed successfully."
        return f"{told} Its place is free when the {left} requests that still have it have ended." if left else told

    async def load_lora_adapter(request: Request) -> Response:
        return PlainTextResponse(f"Success: {await load(request)}")

    async def unload_lora_adapter(request: Request) -> Response:
        return PlainTextResponse(f"Success: {await unload(request)}")

    def loaded(message: str) -> Response:
        adapters = {adapter.name: adapter.path for adapter in context.model.adapters}
        return JSONResponse({"success": True, "message": message, "loaded_adapters": adapters})

    async def load_as_sglang(request: Request) -> Response:
        return loaded(await load(request))

    async def unload_as_sglang(request: Request) -> Response:
        return loaded(await unload(request))

    loads, unloads = "Loads a LoRA adapter while requests run.", "Unloads a LoRA adapter while requests run."
    texts = ("text/plain",)
    return [
        Endpoint(
            *("POST", "/v1/load_lora_adapter", load_lora_adapter, loads, Access.ADMIN),
            body=LoadAdapterRequest,
            media_types=texts,
        ),
        Endpoint(
            *("POST", "/v1/unload_lora_adapter", unload_lora_adapter, unloads, Access.ADMIN),
            body=UnloadAdapterRequest,
            media_types=texts,
        ),
        Endpoint(*("POST", "/load_lora_adapter", load_as_sglang, loads, Access.ADMIN), body=LoadAdapterRequest),
        Endpoint(*("POST", "/unload_lora_adapter", unload_as_sglang, unloads, Access.ADMIN), body=UnloadAdapterRequest),
    ]
