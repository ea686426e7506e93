"""What every route of the gateway works with."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.glance import Glance
from allspan.client.gateway.keys import Keys
from allspan.client.gateway.submit import Submitter


@dataclass(frozen=True)
class Front:
    """Handed to each maker of routes (`http.ROUTES`)."""

    submitter: Submitter
    config: GatewayConfig
    keys: Keys
    glance: Glance
